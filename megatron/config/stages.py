"""Divides the layers over the pipeline stages."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from megatron.errors import ConfigError
from megatron.layout import PP_FLAG, nearest_divisors

LAYERS_FLAG = "--num-layers"
CHUNK_FLAG = "--num-layers-per-virtual-pipeline-stage"
FIRST_FLAG = "--decoder-first-pipeline-num-layers"
LAST_FLAG = "--decoder-last-pipeline-num-layers"


@dataclass(frozen=True)
class StageLayers:
    """The layers of every stage in the order of the model. Stage c * ranks + r is chunk c of rank r."""

    stages: tuple[range, ...]
    ranks: int

    @property
    def chunks(self) -> int:
        return len(self.stages) // self.ranks

    def of_rank(self, rank: int) -> list[range]:
        return [self.stages[chunk * self.ranks + rank] for chunk in range(self.chunks)]


def split_layers(
    layers: int,
    ranks: int,
    *,
    layers_per_chunk: int | None = None,
    first: int | None = None,
    last: int | None = None,
) -> StageLayers:
    """Equal stages, unless `first` or `last` gives the number of layers of the first or last rank: the others then
    share the rest. With `layers_per_chunk` every rank holds several (virtual) stages of that many layers."""
    if layers_per_chunk is not None:
        return StageLayers(_runs([layers_per_chunk] * _chunks(layers, ranks, layers_per_chunk, first, last)), ranks)
    given = {0: first, ranks - 1: last} if ranks > 1 else {}
    fixed = {rank: count for rank, count in given.items() if count is not None}
    rest, others = layers - sum(fixed.values()), ranks - len(fixed)
    if (others and (rest < others or rest % others)) or (not others and rest) or min([1, *fixed.values()]) < 1:
        raise ConfigError(_uneven(layers, ranks, first, last, rest, others))
    return StageLayers(_runs([fixed.get(rank, rest // max(others, 1)) for rank in range(ranks)]), ranks)


def _runs(counts: list[int]) -> tuple[range, ...]:
    return tuple(range(end - count, end) for count, end in zip(counts, accumulate(counts)))


def _chunks(layers: int, ranks: int, per_chunk: int, first: int | None, last: int | None) -> int:
    if ranks == 1:
        raise ConfigError(
            f"{CHUNK_FLAG} {per_chunk}: there is one pipeline stage ({PP_FLAG} 1); remove it or raise that"
        )
    if first is not None or last is not None:
        flag = FIRST_FLAG if first is not None else LAST_FLAG
        raise ConfigError(f"{CHUNK_FLAG} {per_chunk} and {flag} are both given; keep one of them")
    if layers % (ranks * per_chunk):
        fits = [n for n in range(1, layers // ranks + 1) if layers % (ranks * n) == 0]
        way = f"use {CHUNK_FLAG} {' or '.join(map(str, fits))}" if fits else f"use a multiple of {ranks} layers"
        raise ConfigError(
            f"{LAYERS_FLAG} {layers} does not divide by {PP_FLAG} {ranks} x {CHUNK_FLAG} {per_chunk}; {way}"
        )
    return layers // per_chunk


def _uneven(layers: int, ranks: int, first: int | None, last: int | None, rest: int, others: int) -> str:
    given = [f"{flag} {count}" for flag, count in ((FIRST_FLAG, first), (LAST_FLAG, last)) if count is not None]
    if not given:
        fits = " or ".join(str(n) for n in nearest_divisors(layers, ranks))
        uneven = f", or give the first or last stage another number of layers with {FIRST_FLAG} or {LAST_FLAG}"
        return (
            f"{LAYERS_FLAG} {layers} does not divide by {PP_FLAG} {ranks}; use {PP_FLAG} {fits}"
            f"{uneven if layers > ranks else ''}"
        )
    left = f"{rest} layers for {others} other stages" if others else f"{rest} layers that no stage holds"
    return f"{LAYERS_FLAG} {layers}, {PP_FLAG} {ranks}: {' and '.join(given)} leave {left}; change one of them"
