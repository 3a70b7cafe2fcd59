"""Balanced split of a sequence into 2N chunks: rank r of N holds chunks r and 2N - 1 - r.

Under a causal mask late tokens attend to more keys than early ones. With this split, all ranks have the same work.
Tokens occur in three orders. In sequence order, they have ascending positions. A rank's own part is its two chunks,
ascending. In by-rank order, the parts of ranks 0, 1, ... are concatenated, as collectives deliver them.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.distributed.parallel_state import Axis
from megatron.errors import ConfigError
from megatron.layout import CP_FLAG, nearest_multiples
from megatron.model.attention import SequenceView
from megatron.model.attention_mask import Window
from megatron.model.kv_cache import KVCache
from megatron.model.passes import Batch, shape_of
from megatron.ops.documents import Documents


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """Numbers of the two chunks of a rank: one from each end, which balances causal attention."""
    return rank, 2 * ranks - 1 - rank


def own_part(x: Tensor, cp: Axis, dim: int) -> Tensor:
    """This rank's part of a sequence along `dim`."""
    if cp.size == 1:
        return x
    assert x.shape[dim] % (2 * cp.size) == 0, f"{x.shape[dim]} tokens cannot be cut into {2 * cp.size} chunks"
    chunks = x.chunk(2 * cp.size, dim)
    return torch.cat([chunks[number] for number in chunks_of(cp.rank, cp.size)], dim)


def in_sequence(x: Tensor, ranks: int, dim: int) -> Tensor:
    """Reorders from by-rank order to sequence order."""
    order = _by_rank(ranks)
    return _reordered(x, sorted(range(len(order)), key=order.__getitem__), dim)


def by_rank(x: Tensor, ranks: int, dim: int) -> Tensor:
    """Reorders from sequence order to by-rank order."""
    return _reordered(x, _by_rank(ranks), dim)


def own_positions(tokens: int, cp: Axis, device: torch.device) -> Tensor:
    """Positions in the sequence of this rank's `tokens` tokens."""
    first, second = chunks_of(cp.rank, cp.size)
    size = tokens // 2
    steps = torch.arange(size, device=device)
    return torch.cat([steps + first * size, steps + second * size])


def slice_batch(batch: Batch, cp: Axis) -> Batch:
    """Cuts every tensor [batch, seq, ...] of a batch to this rank's part of the sequence. Document ids stay whole,
    because attention needs the ids of all tokens."""
    if cp.size == 1:
        return batch
    shape = _tokens_shape(batch, cp)

    def cut(name: str, value: Any) -> Any:
        per_token = isinstance(value, Tensor) and value.shape[:2] == shape and name != "document_ids"
        return own_part(value, cp, 1) if per_token else value

    return {name: cut(name, value) for name, value in batch.items()}


def _tokens_shape(batch: Batch, cp: Axis) -> torch.Size:
    shape = shape_of(batch) if isinstance(batch.get("tokens", batch.get("position_ids")), Tensor) else torch.Size()
    if len(shape) != 2:
        raise ConfigError(
            f"{CP_FLAG} {cp.size}: only a batch with 'tokens' [batch, seq] can be split over ranks, but this one has "
            f"{', '.join(map(str, batch))}; use {CP_FLAG} 1 for other data"
        )
    if shape[1] % (2 * cp.size):
        lengths = " or ".join(map(str, nearest_multiples(shape[1], 2 * cp.size)))
        raise ConfigError(
            f"{CP_FLAG} {cp.size}: samples of {shape[1]} tokens are not divisible into {2 * cp.size} equal chunks; "
            f"use samples of {lengths} tokens"
        )
    return shape


def _by_rank(ranks: int) -> list[int]:
    return [chunk for rank in range(ranks) for chunk in chunks_of(rank, ranks)]


def _reordered(x: Tensor, order: list[int], dim: int) -> Tensor:
    chunks = x.chunk(len(order), dim)
    return torch.cat([chunks[number] for number in order], dim)


class ContextAttention(Protocol):
    """Core attention whose queries are this rank's part of the sequence. `visible` is called once per pass. All layers
    pass its result to `forward` as the last argument. Its type depends on the implementation."""

    @staticmethod
    def visible(
        cp: Axis, shape: torch.Size, window: Window, documents: Documents | None, device: torch.device
    ) -> Any: ...


class SharedSequence(SequenceView):
    """View of a sequence of which each rank holds a part. `document_ids` cover the whole sequence."""

    def __init__(self, cp: Axis, attention: type[ContextAttention]) -> None:
        self.cp, self.attention = cp, attention

    def past(self, cache: KVCache | None) -> int:
        if cache is not None:
            raise ConfigError(
                f"--context-parallel-size {self.cp.size}: generation with a cache of keys and values needs the whole "
                "sequence on every rank; use --context-parallel-size 1"
            )
        return 0

    def positions(self, tokens: int, past: int, device: torch.device) -> Tensor:
        return own_positions(tokens, self.cp, device)

    def visible(self, shape: torch.Size, *, window: Window, documents: Documents | None, device: torch.device) -> Any:
        if documents is not None:
            documents.check_shape(shape[0], shape[1] * self.cp.size)
        return self.attention.visible(self.cp, shape, window, documents, device)
