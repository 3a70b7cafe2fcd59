"""Transformer layer, with several placements of norms and residual connections."""

from contextlib import AbstractContextManager

from torch import Tensor, nn

from megatron.model.attention import AttentionContext
from megatron.model.factory import ModuleFactory
from megatron.model.mlp import MLP
from megatron.model.moe import MoE
from megatron.model.norm import Norm
from megatron.model.parameters import MLP as MLP_NAME
from megatron.model.self_attention import SelfAttention


def make_layer(make: ModuleFactory, layer: int) -> "Layer":
    """Makes the layer with this number, counted from 0 over the whole model."""
    if make.config.norm_placement == "after":
        return NormAfterBlock(make, layer)
    return ParallelBlock(make, layer) if make.config.use_parallel_residual else Block(make, layer)


class Layer(nn.Module):
    """Base class of all transformer layers."""

    self_attention: SelfAttention
    mlp: MLP | MoE

    def __init__(self, make: ModuleFactory) -> None:
        super().__init__()
        self.dropout, self.hidden_dropout = make.dropout, make.config.hidden_dropout
        self.recomputed, self.recomputation = make.recompute.modules, make.recomputation

    def _feed_forward(self, x: Tensor) -> Tensor:
        kind = "moe" if isinstance(self.mlp, MoE) else "mlp"
        return self.recomputation.call(self.mlp, kind in self.recomputed, x)

    def _norm_again(self, normed: Tensor, norm: Norm, x: Tensor) -> AbstractContextManager[None]:
        """Context in which functions keep nothing of `normed`, which is norm(x), if norms are recomputed."""
        return self.recomputation.instead_of(normed, lambda: norm(x), "layernorm" in self.recomputed)

    def _drop(self, x: Tensor) -> Tensor:
        return self.dropout(x, self.hidden_dropout, True) if self.training else x


class Block(Layer):
    """y = x + attention(norm(x)); returns y + MLP(norm(y))."""

    def __init__(self, make: ModuleFactory, layer: int) -> None:
        super().__init__(make)
        config = make.config
        self.input_layernorm = make.norm(config.hidden_size)
        self.self_attention = SelfAttention(make, layer)
        self.post_attention_layernorm = make.norm(config.hidden_size)
        self.mlp = _mlp(make, layer)
        self.residual_after_norm = config.apply_residual_connection_post_layernorm
        self.kernels = make.kernels

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        normed = self.input_layernorm(x)  # [batch, seq, hidden], like everything below
        with self._norm_again(normed, self.input_layernorm, x):
            attended = self._drop(self.self_attention(normed, context))
        normed, x = self.post_attention_layernorm.of_sum(attended, normed if self.residual_after_norm else x)
        # No bias here: the projections add theirs inside the matrix product.
        with self._norm_again(normed, self.post_attention_layernorm, x):
            branch, residual = self._feed_forward(normed), normed if self.residual_after_norm else x
        return self.kernels.bias_dropout_add(branch, None, residual, self._drop)


class ParallelBlock(Block):
    """x + attention(norm(x)) + MLP(another norm(x)), as in GPT-NeoX."""

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        normed = self.input_layernorm(x)
        with self._norm_again(normed, self.input_layernorm, x):
            attended = self._drop(self.self_attention(normed, context))
        normed = self.post_attention_layernorm(x)
        with self._norm_again(normed, self.post_attention_layernorm, x):
            branch = self._feed_forward(normed)
        return self.kernels.bias_dropout_add(branch, None, x + attended, self._drop)


class NormAfterBlock(Layer):
    """y = x + norm(attention(x)); returns y + norm(MLP(y)), as in OLMo-2."""

    def __init__(self, make: ModuleFactory, layer: int) -> None:
        super().__init__(make)
        config = make.config
        self.self_attention = SelfAttention(make, layer)
        self.attention_output_layernorm = make.norm(config.hidden_size)
        self.mlp = _mlp(make, layer)
        self.mlp_output_layernorm = make.norm(config.hidden_size)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        dtype = self.attention_output_layernorm.weight.dtype  # the residual stream may be fp32
        x = x + self._drop(self.attention_output_layernorm(self.self_attention(x.to(dtype), context)))
        return x + self._drop(self.mlp_output_layernorm(self._feed_forward(x.to(dtype))))


def _mlp(make: ModuleFactory, layer: int) -> MLP | MoE:
    if layer in make.layers_with_experts:
        return MoE(make, layer)
    return MLP(make, MLP_NAME.format(layer=layer), make.config.ffn_size)
