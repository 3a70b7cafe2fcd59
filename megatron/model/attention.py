"""Parts of attention without parameters: the keys that a query may see, and the core attention."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.model.attention_mask import Window, attention_mask
from megatron.model.kv_cache import KVCache
from megatron.ops import Kernels


@dataclass(frozen=True)
class AttentionContext:
    """Inputs of the attention that all layers of one forward pass share."""

    mask: Tensor | None = None  # true = visible; broadcasts to [batch, heads, queries, keys]; includes causality
    causal: bool = True  # the core attention applies a causal mask; False if `mask` includes it or nothing is hidden
    rope: tuple[Tensor, Tensor] | None = None  # cos and sin, [batch or 1, seq, 1, rotated / 2]
    cache: KVCache | None = None


class SequenceView:
    """Positions and visibility of the tokens of one forward pass: the whole sequence, or the tokens after the cache.
    Context parallelism overrides this view and the core attention."""

    def past(self, cache: KVCache | None) -> int:
        """Number of tokens before the tokens of this pass."""
        return 0 if cache is None else cache.length

    def positions(self, tokens: int, past: int, device: torch.device) -> Tensor:
        return torch.arange(past, past + tokens, device=device)

    def visible(
        self, tokens: int, *, window: Window, document_ids: Tensor | None, device: torch.device
    ) -> tuple[Tensor | None, bool]:
        """Returns the core attention's `mask` and `causal`."""
        return attention_mask(tokens, tokens, window=window, document_ids=document_ids, device=device)


class CoreAttention(nn.Module):
    """softmax(QK / sqrt(d)) V."""

    def __init__(self, config: ModelConfig, layer_number: int, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.scale = config.head_dim**-0.5
        self.dropout_p = config.attention_dropout
        self.layer_scaling = layer_number if config.apply_query_key_layer_scaling else 1

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """query [batch, heads, queries, d]; key, value [batch, groups, keys, d] -> [batch, heads, queries, d]."""
        return self.kernels.attention(
            query,
            key,
            value,
            mask=mask,
            causal=causal,
            scale=self.scale,
            dropout_p=self.dropout_p if self.training else 0.0,
            layer_scaling=self.layer_scaling,
        )
