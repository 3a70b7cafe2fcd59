"""Blockwise attention: computes attention of a chunk of queries over a chunk of keys, and merges several results.

Softmax over all keys is the mean of the softmaxes over parts, weighted with exp(log-sum-exp) of each part. The parts
can therefore be processed one after another. Scores, sums and the merged result are in fp32 (fp64 for fp64). A few
queries are processed at a time to bound memory, and all sums have a fixed order.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from megatron.distributed.rng import stream_seed
from megatron.utils.dtype import widened

_ROWS = {"cpu": 128}  # number of queries processed at a time
_ROWS_ACCELERATOR = 1024
_SCORES = 1 << 26  # upper limit of the number of scores at a time
_HEADROOM = 64.0  # fp16 scores are computed divided by 64, so that none overflows; a power of two is exact


@dataclass(frozen=True)
class Softmax:
    """Softmax settings of one attention call."""

    scale: float
    dropout_p: float = 0.0
    seed: int = 0  # of the dropout mask; the backward pass generates the same mask again


@dataclass(frozen=True)
class Pair:
    """Chunk of queries, and a chunk of keys that starts no later in the sequence."""

    query_chunk: int
    key_chunk: int
    distance: int  # tokens from the first key to the first query
    look_back: int | None  # the window in tokens; None is unlimited
    query_documents: Tensor | None  # [batch, queries]
    key_documents: Tensor | None

    @property
    def may_hide_all(self) -> bool:
        """True if a query may see none of the keys."""
        return self.look_back is not None or self.query_documents is not None

    def keys_before(self, stop: int, keys: int) -> int:
        """Upper limit of the keys that queries before `stop` can see."""
        return min(keys, self.distance + stop)

    def hidden(self, start: int, stop: int, keys: int, device: torch.device) -> tuple[int, Tensor] | None:
        """Returns (first, mask [batch or 1, 1, 1, stop - start, keys - first]) of the queries start..stop, or None if
        they see all of the first `keys` keys. The mask is true for hidden keys. Keys before `first` are visible."""
        parts, first = [], 0
        if self.query_documents is not None and self.key_documents is not None:
            parts.append(self.query_documents[:, start:stop, None] != self.key_documents[:, None, :keys])
        if self.look_back is not None and self.distance + stop - 1 > self.look_back:
            parts.append(self._distances(start, stop, 0, keys, device) > self.look_back)
        if keys - 1 > self.distance + start:
            first = 0 if parts else self.distance + start
            parts.append(self._distances(start, stop, first, keys, device) < 0)
        return (first, reduce(torch.logical_or, parts)[:, None, None]) if parts else None

    def _distances(self, start: int, stop: int, first: int, keys: int, device: torch.device) -> Tensor:
        """Number of tokens from each key to each query, [1, rows, keys from `first` on]."""
        query = torch.arange(start + self.distance, stop + self.distance, device=device).unsqueeze(1)
        return (query - torch.arange(first, keys, device=device))[None]


def forward(query: Tensor, key: Tensor, value: Tensor, pair: Pair, softmax: Softmax) -> tuple[Tensor, Tensor]:
    """query [batch, heads, queries, d], key and value [batch, groups, keys, d] -> result [batch, heads, queries, d] and
    log-sum-exp of the scores [batch, heads, queries], both in at least fp32. A query that sees no key gives 0 and
    -inf."""
    wide = torch.promote_types(query.dtype, torch.float32)
    result = torch.empty_like(query, dtype=wide, memory_format=torch.contiguous_format)
    log_sum = query.new_empty(query.shape[:3], dtype=wide)
    for start, stop, keys in _blocks(query, key, pair):
        scores = _scores(query[:, :, start:stop], key[:, :, :keys], pair, start, softmax)
        probabilities, block_sum = _softmax(scores, pair.may_hide_all)
        kept = _kept(probabilities, pair, start, softmax)
        if kept is not None:
            probabilities.mul_(kept)
        product = probabilities.to(value.dtype).flatten(2, 3) @ value[:, :, :keys]
        result[:, :, start:stop] = _by_head(product, stop - start)
        log_sum[:, :, start:stop] = block_sum.flatten(1, 2)
    return result, log_sum


def merge_partial_attention(result: Tensor, log_sum: Tensor, other: Tensor, other_sum: Tensor) -> None:
    """Merges attention over other keys into `result` [batch, heads, queries, d] and `log_sum` [batch, heads, queries],
    in place."""
    total = torch.logaddexp(log_sum, other_sum)
    reference = total.masked_fill(total == -math.inf, 0.0)  # for queries that see no key: exp(-inf - 0) is 0, not NaN
    result.mul_((log_sum - reference).exp_().unsqueeze(-1))
    result.addcmul_(other, (other_sum - reference).exp_().unsqueeze(-1))
    log_sum.copy_(total)


@dataclass(frozen=True)
class Finished:
    """Inputs of the backward pass for a chunk of queries, after all merges."""

    log_sum: Tensor  # [batch, heads, queries]
    grad: Tensor  # gradient of the result [batch, heads, queries, d]
    delta: Tensor  # grad . result [batch, heads, queries]


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pair: Pair,
    softmax: Softmax,
    finished: Finished,
    into: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Adds this pair's contribution to `into`, the gradients of query, key and value in at least fp32."""
    grad_query, grad_key, grad_value = into
    groups = key.shape[1]
    for start, stop, keys in _blocks(query, key, pair):
        rows = slice(start, stop)
        scores = _scores(query[:, :, rows], key[:, :, :keys], pair, start, softmax)
        log_sum, delta = (_by_group(x[:, :, rows, None], groups) for x in (finished.log_sum, finished.delta))
        probabilities = scores.sub_(log_sum).exp_()
        kept = _kept(probabilities, pair, start, softmax)
        grad = _by_group(finished.grad[:, :, rows], groups).flatten(2, 3)  # [batch, groups, ratio * rows, d]
        dropped = probabilities if kept is None else probabilities * kept
        grad_value[:, :, :keys] += dropped.to(grad.dtype).flatten(2, 3).transpose(-1, -2) @ grad
        grad_probabilities = widened(grad @ value[:, :, :keys].transpose(-1, -2)).view_as(probabilities)
        if kept is not None:
            grad_probabilities.mul_(kept)
        grad_scores = grad_probabilities.sub_(delta).mul_(probabilities).to(query.dtype).flatten(2, 3)
        scaled = _by_group(query[:, :, rows], groups).flatten(2, 3) * softmax.scale
        grad_key[:, :, :keys] += grad_scores.transpose(-1, -2) @ scaled
        grad_query[:, :, rows] += _by_head(grad_scores @ key[:, :, :keys], stop - start) * softmax.scale


def _blocks(query: Tensor, key: Tensor, pair: Pair) -> Iterator[tuple[int, int, int]]:
    """Yields (start, stop, keys): the bounds of a block of queries, and the number of keys that the block can see."""
    batch, heads, queries, _ = query.shape
    rows = min(_ROWS.get(query.device.type, _ROWS_ACCELERATOR), max(1, _SCORES // (batch * heads * key.shape[2])))
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        yield start, stop, pair.keys_before(stop, key.shape[2])


def _scores(query: Tensor, key: Tensor, pair: Pair, start: int, softmax: Softmax) -> Tensor:
    """Scores [batch, groups, heads per group, rows, keys], -inf where hidden. Heads that share a key are rows of one
    matrix product, so keys are never repeated."""
    headroom = _HEADROOM if query.dtype == torch.float16 else 1.0
    scaled = _by_group(query, key.shape[1]) * (softmax.scale / headroom)
    scores = widened(scaled.flatten(2, 3) @ key.transpose(-1, -2)).unflatten(2, scaled.shape[2:4])
    if headroom != 1.0:
        scores.mul_(headroom)
    hidden = pair.hidden(start, start + query.shape[2], key.shape[2], query.device)
    if hidden is not None:
        first, mask = hidden
        scores[..., first:].masked_fill_(mask, -math.inf)
    return scores


def _softmax(scores: Tensor, may_hide_all: bool) -> tuple[Tensor, Tensor]:
    """Probabilities and log-sum-exp. The latter is computed from the largest probability, exp(peak - log-sum-exp)."""
    probabilities, peak = torch.softmax(scores, -1), scores.amax(-1)
    log_sum = peak - probabilities.amax(-1).log_()
    if may_hide_all:
        nothing = peak == -math.inf
        probabilities.masked_fill_(nothing.unsqueeze(-1), 0.0)
        log_sum.masked_fill_(nothing, -math.inf)
    return probabilities, log_sum


def _kept(probabilities: Tensor, pair: Pair, start: int, softmax: Softmax) -> Tensor | None:
    """Dropout factors, 0 or 1 / (1 - p): the same in forward and backward. None without dropout."""
    if softmax.dropout_p == 0.0:
        return None
    generator = torch.Generator(probabilities.device)
    generator.manual_seed(stream_seed(softmax.seed, pair.query_chunk, pair.key_chunk, start))
    keep = 1.0 - softmax.dropout_p
    kept = torch.empty_like(probabilities).bernoulli_(keep, generator=generator)
    return kept.div_(keep) if keep > 0.0 else kept


def _by_group(x: Tensor, groups: int) -> Tensor:
    """Reshapes [batch, heads, rows, ...] -> [batch, groups, heads per group, rows, ...]."""
    return x.unflatten(1, (groups, -1))


def _by_head(x: Tensor, rows: int) -> Tensor:
    """[batch, groups, heads per group * rows, d] -> [batch, heads, rows, d]."""
    return x.unflatten(2, (-1, rows)).flatten(1, 2)
