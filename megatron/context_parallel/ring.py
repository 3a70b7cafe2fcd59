"""Ring attention: blocks of keys and values rotate over the ranks, and each rank merges its queries' attention to them.

The next block is received while the current one is processed. In the backward pass the blocks rotate once more, and
their gradients follow one step later, so that no rank holds more than two blocks of each.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron.context_parallel import blocks
from megatron.context_parallel.blocks import Finished, Pair, Softmax
from megatron.context_parallel.sequence import chunks_of
from megatron.distributed import collectives
from megatron.distributed.parallel_state import Axis
from megatron.distributed.rng import default_generator, next_seed
from megatron.model.attention import CoreAttention
from megatron.model.attention_mask import Window, look_back
from megatron.ops.documents import Documents


class RingAttention(nn.Module):
    """Computes ring attention. Dropout uses a random stream per rank, because ranks hold different queries."""

    def __init__(self, core: CoreAttention, cp: Axis, window: Window) -> None:
        super().__init__()
        self.core, self.cp = core, cp
        self.look_back = look_back(window)

    @staticmethod
    def visible(
        cp: Axis, shape: torch.Size, window: Window, documents: Documents | None, device: torch.device
    ) -> Tensor | None:
        """Returns the number of each token's document, [batch, seq]; `forward` derives the mask block by block."""
        return None if documents is None else documents.numbers()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, document_ids: Tensor | None) -> Tensor:
        """query [batch, heads, seq / ranks, d]; key, value [batch, groups, seq / ranks, d]."""
        dropout_p = self.core.dropout_p if self.training else 0.0
        seed = next_seed(default_generator(query.device)) if dropout_p else 0
        softmax = Softmax(self.core.scale, dropout_p, seed)
        return _Ring.apply(query, key, value, document_ids, _Ringed(self.cp, softmax, self.look_back))


@dataclass(frozen=True)
class _Ringed:
    cp: Axis
    softmax: Softmax
    look_back: int | None

    def pairs(self, owner: int, chunk: int, document_ids: Tensor | None) -> Iterator[tuple[int, int, Pair]]:
        """Yields (index of this rank's chunk, index of the owner's chunk, their `Pair`) of all pairs in which a query
        may see a key. In this rank's own block, each chunk is paired with itself first, so that every query has seen a
        key when later pairs are merged."""
        mine, theirs = chunks_of(self.cp.rank, self.cp.size), chunks_of(owner, self.cp.size)
        for q, query_chunk in enumerate(mine):
            for k, key_chunk in sorted(enumerate(theirs), reverse=True):
                distance = (query_chunk - key_chunk) * chunk
                beyond = self.look_back is not None and distance - (chunk - 1) > self.look_back
                if distance < 0 or beyond:
                    continue
                documents = [_chunk(document_ids, number, chunk) for number in (query_chunk, key_chunk)]
                yield q, k, Pair(query_chunk, key_chunk, distance, self.look_back, *documents)


def _chunk(document_ids: Tensor | None, number: int, size: int) -> Tensor | None:
    return None if document_ids is None else document_ids[:, number * size : (number + 1) * size]


def _rotation(block: Tensor, cp: Axis) -> Iterator[tuple[int, Tensor]]:
    """Yields (owner, block) of every rank, this rank's own first. The next block is received while the caller uses the
    current one."""
    for step in range(cp.size):
        last = step == cp.size - 1
        arriving = None if last else collectives.start_shift(block, cp)
        yield (cp.rank - step) % cp.size, block
        if arriving is not None:
            block = arriving.wait()


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, document_ids: Tensor | None, ring: _Ringed
    ) -> Tensor:
        wide, chunk = torch.promote_types(query.dtype, torch.float32), query.shape[2] // 2
        # Stored as [batch, seq, heads, d], the layout that the output projection reads.
        result = torch.zeros_like(query.transpose(1, 2), dtype=wide, memory_format=torch.contiguous_format)
        results = result.transpose(1, 2).chunk(2, 2)
        log_sum = query.new_full(query.shape[:3], -torch.inf, dtype=wide)
        log_sums, queries = log_sum.chunk(2, 2), query.chunk(2, 2)
        for owner, block in _rotation(torch.stack((key, value)), ring.cp):
            keys, values = (part.chunk(2, 2) for part in block)
            for q, k, pair in ring.pairs(owner, chunk, document_ids):
                part = blocks.forward(queries[q], keys[k], values[k], pair, ring.softmax)
                blocks.merge_partial_attention(results[q], log_sums[q], *part)
        narrow = result.to(query.dtype).transpose(1, 2)
        ctx.save_for_backward(query, key, value, document_ids, narrow, log_sum)
        ctx.ring = ring
        return narrow

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, document_ids, result, log_sum = ctx.saved_tensors
        ring: _Ringed = ctx.ring
        wide, chunk = log_sum.dtype, query.shape[2] // 2
        delta = (grad.to(wide) * result.to(wide)).sum(-1)
        finished = [Finished(*parts) for parts in zip(*(x.chunk(2, 2) for x in (log_sum, grad, delta)))]
        grad_query = torch.zeros_like(query, dtype=wide, memory_format=torch.contiguous_format)
        grad_queries, queries = grad_query.chunk(2, 2), query.chunk(2, 2)
        arriving = None
        for owner, block in _rotation(torch.stack((key, value)), ring.cp):
            grad_block = torch.zeros_like(block, dtype=wide)
            keys, values = (part.chunk(2, 2) for part in block)
            grad_keys, grad_values = (part.chunk(2, 2) for part in grad_block)
            for q, k, pair in ring.pairs(owner, chunk, document_ids):
                into = grad_queries[q], grad_keys[k], grad_values[k]
                blocks.backward(queries[q], keys[k], values[k], pair, ring.softmax, finished[q], into)
            if arriving is not None:  # the contributions of the previous ranks to this block
                grad_block += arriving.wait()
            arriving = collectives.start_shift(grad_block, ring.cp)
        assert arriving is not None
        grad_key, grad_value = arriving.wait().to(key.dtype)  # the last shift returns this rank's own block
        return grad_query.to(query.dtype), grad_key, grad_value, None, None
