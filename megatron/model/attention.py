"""Attention without parameters: which keys a query may see, the product over them, and the cache of past ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.ops import Kernels


class KVCache:
    """KV cache for generation, preallocated to `max_length` tokens; the model advances `length` after every pass."""

    def __init__(
        self,
        layers: Iterable[int],
        *,
        batch: int,
        groups: int,
        max_length: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (batch, groups, max_length, head_dim)
        self.max_length = max_length
        self.length = 0
        self.keys = {layer: torch.empty(shape, dtype=dtype, device=device) for layer in layers}
        self.values = {layer: torch.empty(shape, dtype=dtype, device=device) for layer in layers}

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write key and value [batch, groups, new, head_dim] behind the past; return past and new together."""
        end = self.length + key.shape[2]
        assert end <= self.max_length, f"KV cache of {self.max_length} tokens asked to hold {end}"
        self.keys[layer][:, :, self.length : end] = key
        self.values[layer][:, :, self.length : end] = value
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]


@dataclass(frozen=True)
class AttentionContext:
    """Inputs of the attention that all layers of one forward pass share."""

    mask: Tensor | None = None  # true = may look; broadcasts to [batch, heads, queries, keys]; includes causality
    causal: bool = True  # the core adds the causal triangle; False where the mask has it or nothing is hidden
    rope: tuple[Tensor, Tensor] | None = None  # cos and sin, [batch or 1, seq, 1, rotated / 2]
    cache: KVCache | None = None


Window = tuple[int, int] | None  # how far a query may look back and ahead; -1 is no limit


def attention_mask(
    queries: int,
    keys: int,
    *,
    window: Window,
    document_ids: Tensor | None,
    device: torch.device,
) -> tuple[Tensor | None, bool]:
    """(mask, causal) for the last `queries` of `keys` positions; document_ids [batch, keys]. The mask is
    None where plain causal attention is all there is."""
    left = -1 if window is None else window[0]  # causality hides everything to the right whatever the window says
    windowed = left >= 0 and left + 1 < keys
    if document_ids is None and not windowed:
        return None, queries > 1
    position = torch.arange(keys, device=device)
    distance = position[keys - queries :].unsqueeze(1) - position  # [queries, keys]
    mask = distance >= 0
    if windowed:
        mask &= distance <= left
    mask = mask[None, None]  # [1, 1, queries, keys]
    if document_ids is not None:
        mask = mask & (document_ids[:, None, keys - queries :, None] == document_ids[:, None, None, :])
    return mask, False


class SequenceView:
    """Positions and visibility of the tokens of one forward pass: here the whole sequence, or what follows the cache.
    Context parallelism has a view of its own, with its own core attention."""

    def past(self, cache: KVCache | None) -> int:
        """The number of tokens before those of this pass."""
        return 0 if cache is None else cache.length

    def positions(self, tokens: int, past: int, device: torch.device) -> Tensor:
        return torch.arange(past, past + tokens, device=device)

    def visible(
        self, tokens: int, past: int, *, window: Window, document_ids: Tensor | None, device: torch.device
    ) -> tuple[Tensor | None, bool]:
        """The core attention's `mask` and `causal`."""
        return attention_mask(tokens, past + tokens, window=window, document_ids=document_ids, device=device)


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
