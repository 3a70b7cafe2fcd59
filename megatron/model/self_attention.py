"""Self-attention: fused QKV per key/value group, positions, core attention, output projection."""

from torch import Tensor, nn

from megatron.model.attention import AttentionContext
from megatron.model.factory import ModuleFactory
from megatron.model.norm import Norm
from megatron.model.parameters import ATTENTION_OUT, K_NORM, Q_NORM, QKV
from megatron.ops.fused_qkv import split_qkv


class SelfAttention(nn.Module):
    def __init__(self, make: ModuleFactory, layer: int) -> None:
        super().__init__()
        config = make.config
        self.layer, self.kernels, self.head_dim = layer, make.kernels, config.head_dim
        heads, groups = config.num_attention_heads, config.query_groups
        qkv, dense = QKV.format(layer=layer), ATTENTION_OUT.format(layer=layer)
        rows = (heads + 2 * groups) * self.head_dim
        self.query_key_value = make.linear(qkv, config.hidden_size, rows, bias=config.qkv_bias)
        self.dense = make.linear(dense, heads * self.head_dim, config.hidden_size, bias=config.linear_bias)
        self.q_layernorm = make.head_norm(Q_NORM.format(layer=layer), heads) if config.qk_layernorm else None
        self.k_layernorm = make.head_norm(K_NORM.format(layer=layer), groups) if config.qk_layernorm else None
        self.norms_span_heads = config.qk_layernorm_scope == "all"
        self.core_attention = make.core_attention(layer)
        self.recompute_core, self.recomputation = "core_attn" in make.recompute.modules, make.recomputation
        # Heads on this rank: the output projection has one column per query channel.
        queries = self.dense.weight.shape[1] // self.head_dim
        self.groups = (self.query_key_value.weight.shape[0] // self.head_dim - queries) // 2

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        query, key, value = self._query_key_value(x)  # [batch, seq, heads or groups, head_dim]
        if context.rope is not None:
            query, key = self.kernels.rope(query, *context.rope), self.kernels.rope(key, *context.rope)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if context.cache is not None:
            key, value = context.cache.extend(self.layer, key, value)
        core = self.recomputation.call(self.core_attention, self.recompute_core, query, key, value, context.visible)
        return self.dense(core.transpose(1, 2).flatten(2))  # [batch, seq, hidden]

    def _query_key_value(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.query_key_value(x)
        query, key, value = split_qkv(qkv.view(*qkv.shape[:2], self.groups, -1, self.head_dim))
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self._normed(query, self.q_layernorm), self._normed(key, self.k_layernorm)
        return query, key, value

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        """Normalises x [batch, seq, heads, head_dim] per head, or over all heads together."""
        return norm(x.flatten(2)).view(x.shape) if self.norms_span_heads else norm(x)
