"""All-to-all attention (DeepSpeed's Ulysses): exchanges the split of the sequence for a split of the heads, and
back."""

from __future__ import annotations

from math import lcm
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron.context_parallel.order import by_rank, in_sequence
from megatron.distributed import collectives
from megatron.distributed.state import Axis
from megatron.model.attention import CoreAttention, Window, attention_mask


class UlyssesAttention(nn.Module):
    """If there are fewer KV heads than ranks they are repeated, so that every rank has those of its query heads."""

    def __init__(self, core: CoreAttention, cp: Axis, window: Window) -> None:
        super().__init__()
        self.core, self.cp = core, cp

    @staticmethod
    def visible(
        cp: Axis, tokens: int, window: Window, document_ids: Tensor | None, device: torch.device
    ) -> tuple[Tensor | None, bool]:
        whole = tokens * cp.size
        return attention_mask(whole, whole, window=window, document_ids=document_ids, device=device)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """query [batch, heads, seq / ranks, d]; key, value [batch, groups, seq / ranks, d]."""
        ranks, groups = self.cp.size, key.shape[1]
        copies = lcm(groups, ranks) // groups
        if copies > 1:
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        parts = [x.unflatten(1, (ranks, -1)) for x in (query, key, value)]  # [batch, ranks, heads / ranks, ...]
        sizes = [part.shape[2] for part in parts]
        mine = _HeadsForSequence.apply(torch.cat(parts, 2), self.cp)  # [batch, heads of all three / ranks, seq, d]
        result = self.core(*mine.split(sizes, 1), mask, causal)
        return _SequenceForHeads.apply(result, self.cp)


def _heads_for_sequence(x: Tensor, cp: Axis) -> Tensor:
    """[batch, ranks, heads / ranks, seq / ranks, d] -> [batch, heads / ranks, seq, d]."""
    received = collectives.all_to_all(x.movedim(1, 0), cp)  # [ranks of the sequence, batch, heads, seq / ranks, d]
    return in_sequence(received.movedim(0, 2).flatten(2, 3), cp.size, 2)


def _sequence_for_heads(x: Tensor, cp: Axis) -> Tensor:
    """The way back."""
    parts = by_rank(x, cp.size, 2).unflatten(2, (cp.size, -1))
    return collectives.all_to_all(parts.movedim(2, 0), cp).movedim(0, 1)


class _HeadsForSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: Axis) -> Tensor:
        ctx.cp = cp
        return _heads_for_sequence(x, cp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sequence_for_heads(grad, ctx.cp), None


class _SequenceForHeads(Function):
    """[batch, heads / ranks, seq, d] -> [batch, heads, seq / ranks, d]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: Axis) -> Tensor:
        ctx.cp = cp
        return _sequence_for_heads(x, cp).flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _heads_for_sequence(grad.unflatten(1, (ctx.cp.size, -1)), ctx.cp), None
