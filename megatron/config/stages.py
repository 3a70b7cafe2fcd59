"""Divides the layers over the pipeline stages."""

from dataclasses import dataclass
from itertools import accumulate

from megatron.config.sections.parallel import ParallelConfig
from megatron.errors import ConfigError
from megatron.layout import PP_FLAG, SizesError, Way, divisors

LAYERS_FLAG = "--num-layers"
CHUNK_FLAG = "--num-layers-per-virtual-pipeline-stage"
CHUNKS_FLAG = "--num-virtual-stages-per-pipeline-rank"
EMBEDDING_FLAG = "--account-for-embedding-in-pipeline-split"
LOSS_FLAG = "--account-for-loss-in-pipeline-split"
FIRST_FLAG = "--decoder-first-pipeline-num-layers"
LAST_FLAG = "--decoder-last-pipeline-num-layers"


@dataclass(frozen=True)
class StageLayers:
    """Layers of every stage, in model order. Stage c * ranks + r is chunk c of rank r."""

    stages: tuple[range, ...]
    ranks: int

    @property
    def chunks(self) -> int:
        return len(self.stages) // self.ranks

    def of_rank(self, rank: int) -> list[range]:
        return [self.stages[chunk * self.ranks + rank] for chunk in range(self.chunks)]


def stage_layers(layers: int, parallel: ParallelConfig) -> StageLayers:
    """Divides the layers over the stages by the settings."""
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    embedding, loss = parallel.account_for_embedding_in_pipeline_split, parallel.account_for_loss_in_pipeline_split
    if not (embedding or loss or parallel.has_virtual_stages):
        return split_layers(layers, parallel.pipeline_model_parallel_size, first=first, last=last)
    return _even_stages(layers, parallel)


def split_layers(layers: int, ranks: int, *, first: int | None = None, last: int | None = None) -> StageLayers:
    """Divides the layers over one stage per rank. `first` and `last`: number of layers of the first and last stage.
    The other stages share the rest equally."""
    given = {0: first, ranks - 1: last} if ranks > 1 else {}
    fixed = {rank: count for rank, count in given.items() if count is not None}
    rest, others = layers - sum(fixed.values()), ranks - len(fixed)
    if (others and (rest < others or rest % others)) or (not others and rest) or min([1, *fixed.values()]) < 1:
        raise _uneven(layers, ranks, first, last, rest, others)
    return StageLayers(_runs([fixed.get(rank, rest // max(others, 1)) for rank in range(ranks)]), ranks)


def _runs(counts: list[int]) -> tuple[range, ...]:
    return tuple(range(end - count, end) for count, end in zip(counts, accumulate(counts)))


def _even_stages(layers: int, parallel: ParallelConfig) -> StageLayers:
    """Divides the layers into stages with equal numbers of units, one or several stages per rank. A unit is a layer or,
    with the --account-for-* flags, the embedding or the loss. So a stage may have no layer."""
    ranks, per_stage = parallel.pipeline_model_parallel_size, parallel.num_layers_per_virtual_pipeline_stage
    chunks = parallel.num_virtual_stages_per_pipeline_rank
    extra = (parallel.account_for_embedding_in_pipeline_split, parallel.account_for_loss_in_pipeline_split)
    _refuse_other_divisions(parallel)
    units = layers + sum(extra)
    stages = ranks * (chunks or 1) if per_stage is None else units // per_stage
    if units % stages if per_stage is None else units % (ranks * per_stage):
        raise _no_even_stages(layers, parallel, units)
    counts = [units // stages] * stages
    counts[0] -= extra[0]
    counts[-1] -= extra[1]
    return StageLayers(_runs(counts), ranks)


def _refuse_other_divisions(parallel: ParallelConfig) -> None:
    """Raises a ConfigError if there is one pipeline stage, or if two flags divide the layers in different ways."""
    values = {
        CHUNK_FLAG: parallel.num_layers_per_virtual_pipeline_stage,
        CHUNKS_FLAG: parallel.num_virtual_stages_per_pipeline_rank,
        EMBEDDING_FLAG: parallel.account_for_embedding_in_pipeline_split or None,
        LOSS_FLAG: parallel.account_for_loss_in_pipeline_split or None,
        FIRST_FLAG: parallel.decoder_first_pipeline_num_layers,
        LAST_FLAG: parallel.decoder_last_pipeline_num_layers,
    }
    given = {flag: flag if value is True else f"{flag} {value}" for flag, value in values.items() if value is not None}
    if parallel.pipeline_model_parallel_size == 1:
        flag = next(iter(given.values()))
        raise ConfigError(f"{flag}: there is one pipeline stage ({PP_FLAG} 1); remove the flag, or raise {PP_FLAG}")
    apart = [flag for flag in (FIRST_FLAG, LAST_FLAG) if flag in given]
    both = [flag for flag in (CHUNK_FLAG, CHUNKS_FLAG) if flag in given]
    if apart or len(both) == 2:
        one, other = both if len(both) == 2 else (next(iter(given)), apart[0])
        raise ConfigError(f"{given[one]} and {other} both divide the layers; keep one of them")


def _no_even_stages(layers: int, parallel: ParallelConfig, units: int) -> ConfigError:
    ranks, per_stage = parallel.pipeline_model_parallel_size, parallel.num_layers_per_virtual_pipeline_stage
    counted = f" ({units} with the embedding or the loss)" if units > layers else ""
    fits = [n for n in range(1, units // ranks + 1) if units % (ranks * n) == 0]
    chunks, reason = parallel.num_virtual_stages_per_pipeline_rank, f"{LAYERS_FLAG} {layers}{counted} is not divisible"
    if per_stage is None and chunks is None:
        way = Way(f"use {PP_FLAG} {{}}", PP_FLAG, ranks, divisors(units))
        return SizesError(f"{reason} by {PP_FLAG} {ranks}", way)
    flag, size = (CHUNK_FLAG, per_stage) if per_stage is not None else (CHUNKS_FLAG, chunks or 1)
    reason = f"{reason} by {PP_FLAG} {ranks} x {flag} {size}"
    return SizesError(
        reason, Way(f"use {flag} {{}}", flag, size, fits) if fits else f"use a multiple of {ranks} layers"
    )


def _uneven(layers: int, ranks: int, first: int | None, last: int | None, rest: int, others: int) -> ConfigError:
    given = [f"{flag} {count}" for flag, count in ((FIRST_FLAG, first), (LAST_FLAG, last)) if count is not None]
    if not given:
        uneven = f"give the first or last stage another number of layers with {FIRST_FLAG} or {LAST_FLAG}"
        return SizesError(
            f"{LAYERS_FLAG} {layers} is not divisible by {PP_FLAG} {ranks}",
            Way(f"use {PP_FLAG} {{}}", PP_FLAG, ranks, divisors(layers)),
            uneven if layers > ranks else "",
        )
    left = f"{rest} layers for {others} other stages" if others else f"{rest} layers without a stage"
    return ConfigError(
        f"{LAYERS_FLAG} {layers}, {PP_FLAG} {ranks}: {' and '.join(given)} leave {left}; change one of them"
    )
