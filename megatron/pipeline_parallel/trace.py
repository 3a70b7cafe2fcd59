"""When each pass of the last steps ran on each rank: written by the ranks, read to be drawn or measured."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron.distributed.state import Axis
from megatron.errors import ConfigError, DataError
from megatron.pipeline_parallel.schedules import Action
from megatron.pipeline_parallel.simulate import Span

_KEPT = 16
"""Steps: enough for a median, and a long run's trace stays small."""

Passes = list[tuple[Action, float, float]]


@dataclass
class StepTrace:
    """The passes of one rank's last steps. A start is when the pass had what it waited for."""

    place: int = 0
    ranks: int = 1
    micro_batches: int = 0
    chunks: int = 1
    steps: deque[Passes] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def restart(self, pp: Axis, micro_batches: int, chunks: int) -> None:
        """A step begins; those of another shape are forgotten."""
        shape = (pp.rank, pp.size, micro_batches, chunks)
        if shape != (self.place, self.ranks, self.micro_batches, self.chunks):
            self.place, self.ranks, self.micro_batches, self.chunks = shape
            self.steps.clear()
        self.steps.append([])

    def note(self, action: Action, start: float, end: float) -> None:
        self.steps[-1].append((action, start, end))

    def save(self, directory: Path, rank: int) -> None:
        """One file a rank. Clocks of one machine agree; those of several may not."""
        directory.mkdir(parents=True, exist_ok=True)
        content = {
            "place": self.place,
            "ranks": self.ranks,
            "micro_batches": self.micro_batches,
            "chunks": self.chunks,
            "steps": [[[a.kind, a.chunk, a.micro_batch, start, end] for a, start, end in step] for step in self.steps],
        }
        (directory / f"rank{rank:05d}.json").write_text(json.dumps(content) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Trace:
    """One pipeline's step: the spans of all its ranks, in seconds from the first start."""

    spans: tuple[Span, ...]
    ranks: int
    micro_batches: int
    chunks: int


def read_trace(directory: Path) -> Trace:
    """The last step of the first pipeline found in a directory that a run wrote."""
    return read_steps(directory)[-1]


def read_steps(directory: Path) -> list[Trace]:
    """The last steps, in their order, of the first pipeline found (others are copies of it: other data or slices)."""
    files = sorted(directory.glob("rank*.json"))
    if not files:
        raise ConfigError(f"--trace {directory}: no rank*.json there; give a directory that --pipeline-trace wrote")
    found: dict[int, dict] = {}
    for path in files:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            found.setdefault(int(content["place"]), content)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: not a trace ({error}); run again with --pipeline-trace") from None
    first = found[min(found)]
    if sorted(found) != list(range(first["ranks"])):
        raise DataError(f"--trace {directory}: stages {sorted(found)} of {first['ranks']} are there; run again")
    return [_trace(found, step) for step in range(len(first["steps"]))]


def _trace(found: Mapping[int, dict], step: int) -> Trace:
    """One step of all ranks."""
    spans = [span for place in sorted(found) for span in _spans(place, found[place]["steps"][step])]
    start = min((span.start for span in spans), default=0.0)
    moved = tuple(Span(s.rank, s.action, s.start - start, s.end - start) for s in spans)
    first = found[min(found)]
    return Trace(moved, first["ranks"], first["micro_batches"], first["chunks"])


def _spans(place: int, passes: list[list]) -> Iterator[Span]:
    for kind, chunk, micro_batch, start, end in passes:
        yield Span(place, Action(kind, chunk, micro_batch), start, end)
