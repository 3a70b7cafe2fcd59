"""One transformer layer."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.model.attention import AttentionContext
from megatron.model.factory import ModuleFactory
from megatron.model.mlp import MLP
from megatron.model.moe import MoE
from megatron.model.parameters import MLP as MLP_NAME
from megatron.model.self_attention import SelfAttention


class Block(nn.Module):
    def __init__(self, make: ModuleFactory, layer: int) -> None:
        """`layer` counts from 0 over the whole model, whatever part of it this process holds."""
        super().__init__()
        config, name = make.config, MLP_NAME.format(layer=layer)
        self.input_layernorm = make.norm(config.hidden_size)
        self.self_attention = SelfAttention(make, layer)
        self.post_attention_layernorm = make.norm(config.hidden_size)
        with_experts = layer in make.layers_with_experts
        self.mlp: MLP | MoE = MoE(make, layer) if with_experts else MLP(make, name, config.ffn_size)
        self.dropout, self.hidden_dropout = make.dropout, config.hidden_dropout
        self.residual_after_norm = config.apply_residual_connection_post_layernorm
        self.kernels = make.kernels

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        normed = self.input_layernorm(x)  # [batch, seq, hidden], like everything below
        attended = self._drop(self.self_attention(normed, context))
        normed, x = self.post_attention_layernorm.of_sum(attended, normed if self.residual_after_norm else x)
        # No bias here: the projections have added theirs inside the matrix product.
        branch, residual = self.mlp(normed), normed if self.residual_after_norm else x
        return self.kernels.bias_dropout_add(branch, None, residual, self._drop)

    def _drop(self, x: Tensor) -> Tensor:
        return self.dropout(x, self.hidden_dropout, self.training)
