"""One transformer layer."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.model.attention import AttentionContext, SelfAttention
from megatron.model.embedding import Dropout
from megatron.model.mlp import MLP
from megatron.model.moe import MoE
from megatron.model.moe_losses import RouterReports
from megatron.model.norm import Norm
from megatron.model.recompute import Recompute
from megatron.ops import Kernels


class Block(nn.Module):
    """`layer` counts from 0 over the whole model, whatever part of it this process holds."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        kernels: Kernels,
        *,
        dropout: Dropout,
        recompute: Recompute,
        routers: RouterReports | None = None,
    ) -> None:
        """`routers`: given where the layer has experts."""
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config, kernels)
        self.self_attention = SelfAttention(config, layer, kernels, recompute.wrapper("core_attn"))
        self.post_attention_layernorm = Norm(config.hidden_size, config, kernels)
        self.mlp: MLP | MoE = (
            MLP(config, kernels) if routers is None else MoE(config, routers.config, layer, kernels, routers)
        )
        self.mlp_wrapper = recompute.wrapper("mlp")
        self.dropout = dropout
        self.hidden_dropout = config.hidden_dropout
        self.residual_after_norm = config.apply_residual_connection_post_layernorm
        self.kernels = kernels

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        normed = self.input_layernorm(x)  # [batch, seq, hidden], like everything below
        attended = self._drop(self.self_attention(normed, context))
        normed, x = self.post_attention_layernorm.of_sum(attended, normed if self.residual_after_norm else x)
        # The projections have added their bias themselves: a matrix product does it on its way out.
        branch, residual = self.mlp_wrapper(self.mlp, normed), normed if self.residual_after_norm else x
        return self.kernels.bias_dropout_add(branch, None, residual, self._drop)

    def _drop(self, x: Tensor) -> Tensor:
        return self.dropout(x, self.hidden_dropout, self.training)
