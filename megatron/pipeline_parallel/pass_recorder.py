"""Records when each pass of the last steps ran (--pipeline-trace DIR), one file per rank, and reads the files back."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.errors import ConfigError, DataError
from megatron.pipeline_parallel.schedules import Action
from megatron.report.pipeline_timeline import Span, Timeline
from megatron.utils.numerals import INT32
from megatron.utils.typed import typed

if TYPE_CHECKING:  # drawing loads no torch
    from megatron.distributed.state import Axis

_KEPT_STEPS = 16
"""Enough for a median, few enough that the files of a long run stay small."""

PassTimes = list[tuple[Action, float, float]]
"""(action, start, end) of one step's passes; a pass starts when its input has arrived."""


@dataclass
class PassRecorder:
    """The pass times of one rank's last steps."""

    shape: dict[str, int] = field(default_factory=dict)
    """This rank's place in the pipeline, its ranks, micro-batches and chunks a rank."""
    steps: deque[PassTimes] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))

    def begin_step(self, pp: Axis, micro_batches: int, chunks: int) -> None:
        """Drops the earlier steps if they had another shape."""
        shape = {"place": pp.rank, "ranks": pp.size, "micro_batches": micro_batches, "chunks": chunks}
        if shape != self.shape:
            self.shape = shape
            self.steps.clear()
        self.steps.append([])

    def record(self, action: Action, start: float, end: float) -> None:
        self.steps[-1].append((action, start, end))

    def save(self, directory: Path, rank: int) -> None:
        """Times are of the machine's clock: ranks of one machine can be compared, those of several may not."""
        directory.mkdir(parents=True, exist_ok=True)
        steps = [[[a.kind, a.chunk, a.micro_batch, start, end] for a, start, end in step] for step in self.steps]
        content = {**self.shape, "steps": steps}
        (directory / f"rank{rank:05d}.json").write_text(json.dumps(content) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class _Trace:
    """The content of one rank's file."""

    place: int
    ranks: int
    micro_batches: int
    chunks: int
    steps: tuple[tuple[tuple[str, int, int, float, float], ...], ...]

    def __post_init__(self) -> None:
        if not 0 <= self.place < self.ranks or not 0 < self.micro_batches < INT32 or not 0 < self.chunks < INT32:
            raise ValueError(f"stage {self.place} of {self.ranks} with {self.chunks} chunks")
        if not self.steps or not all(self.steps):
            raise ValueError("no passes")
        for kind, chunk, micro_batch, start, end in (each for step in self.steps for each in step):
            inside = chunk in range(self.chunks) and micro_batch in range(self.micro_batches)
            if kind not in ("F", "B", "W") or not inside or not -math.inf < start < end < math.inf:
                raise ValueError(f"{kind[:10]} of micro-batch {micro_batch} from {start} to {end} is no pass")


def read_timelines(directory: Path) -> list[Timeline]:
    """The recorded steps, oldest first, of the directory's first pipeline (its data- and tensor-parallel replicas are
    ignored). Times are seconds from the step's first start."""
    files = sorted(directory.glob("rank*.json"))
    if not files:
        raise ConfigError(f"--trace {directory}: no rank*.json there; give a directory that --pipeline-trace wrote")
    by_place: dict[int, _Trace] = {}
    for path in files:
        try:
            trace = typed(_Trace, json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: not a trace ({error}); run again with --pipeline-trace") from None
        by_place.setdefault(trace.place, trace)
    first = by_place[min(by_place)]
    if sorted(by_place) != list(range(first.ranks)):
        raise DataError(f"--trace {directory}: stages {sorted(by_place)} of {first.ranks} are there; run again")
    shapes = {(t.ranks, t.micro_batches, t.chunks, len(t.steps)) for t in by_place.values()}
    if len(shapes) > 1:
        raise DataError(f"--trace {directory}: the stages are of different runs; run again into an empty directory")
    stages = [by_place[place].steps for place in range(first.ranks)]
    return [_timeline(first, passes) for passes in zip(*stages, strict=True)]


def _timeline(first: _Trace, stages: Sequence[Sequence[tuple[Any, int, int, float, float]]]) -> Timeline:
    first_start = min(start for passes in stages for *_, start, _ in passes)
    spans = tuple(
        Span(place, Action(kind, chunk, micro_batch), start - first_start, end - first_start)
        for place, passes in enumerate(stages)
        for kind, chunk, micro_batch, start, end in passes
    )
    return Timeline(spans, first.ranks, first.micro_batches, first.chunks)
