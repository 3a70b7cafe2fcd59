"""Records when each pass of the last steps ran (--pipeline-trace DIR), one file per rank, and reads the files back."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.errors import ConfigError, DataError
from megatron.pipeline_parallel.schedules import Action
from megatron.pipeline_parallel.timeline import Span, Timeline

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


def read_timelines(directory: Path) -> list[Timeline]:
    """The recorded steps, oldest first, of the directory's first pipeline (its data- and tensor-parallel replicas are
    ignored). Times are seconds from the step's first start."""
    files = sorted(directory.glob("rank*.json"))
    if not files:
        raise ConfigError(f"--trace {directory}: no rank*.json there; give a directory that --pipeline-trace wrote")
    by_place: dict[int, dict] = {}
    for path in files:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            by_place.setdefault(int(content["place"]), content)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: not a trace ({error}); run again with --pipeline-trace") from None
    first = by_place[min(by_place)]
    if sorted(by_place) != list(range(first["ranks"])):
        raise DataError(f"--trace {directory}: stages {sorted(by_place)} of {first['ranks']} are there; run again")
    return [_timeline(by_place, step) for step in range(len(first["steps"]))]


def _timeline(by_place: Mapping[int, dict], step: int) -> Timeline:
    passes = [(place, *each) for place in sorted(by_place) for each in by_place[place]["steps"][step]]
    first_start = min((start for *_, start, _ in passes), default=0.0)
    spans = tuple(
        Span(place, Action(kind, chunk, micro_batch), start - first_start, end - first_start)
        for place, kind, chunk, micro_batch, start, end in passes
    )
    first = by_place[min(by_place)]
    return Timeline(spans, first["ranks"], first["micro_batches"], first["chunks"])
