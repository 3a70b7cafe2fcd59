"""Times at which each pass of a pipelined step ran, recorded or simulated, and the share of the bubble."""

import json
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError, DataError
from megatron.pipeline_schedules import Action, Order, PassKind
from megatron.utils.numerals import INT32
from megatron.utils.typed import typed

Cost = Callable[[int, Action], float]
"""Function from (rank, action) to its duration."""


@dataclass(frozen=True)
class Span:
    """Action of one rank, from start to end."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Spans of all ranks in one step."""

    spans: tuple[Span, ...]
    ranks: int
    micro_batches: int
    chunks: int

    @property
    def end(self) -> float:
        return max(span.end for span in self.spans)

    @property
    def defers_wgrads(self) -> bool:
        """True if weight gradients are separate passes (W), as in the zero-bubble schedule."""
        return any(span.action.kind == "W" for span in self.spans)

    @property
    def bubble(self) -> float:
        """Idle time over busy time of all ranks, from the first start to the last end."""
        busy = sum(span.end - span.start for span in self.spans)
        whole = self.ranks * (self.end - min(span.start for span in self.spans))
        return (whole - busy) / busy

    @property
    def theoretical_bubble(self) -> float:
        """Bubble of p equal stages with v chunks each, for m micro-batches: (p - 1) / (m v). For zero-bubble, with
        equally long F, B and W: (p - 1) / (3 m)."""
        return (self.ranks - 1) / (self.micro_batches * (3 if self.defers_wgrads else self.chunks))


def cost_of_kinds(forward: float, backward: float, weights: float = 0.0) -> Cost:
    """Returns a cost with the same durations for all stages and micro-batches."""
    costs: dict[PassKind, float] = {"F": forward, "B": backward, "W": weights}
    return lambda rank, action: costs[action.kind]


def simulate(
    schedule: Order, ranks: int, micro_batches: int, chunks: int = 1, *, cost: Cost | None = None, transfer: float = 0.0
) -> Timeline:
    """Runs each rank's actions in order, once their inputs have arrived; `transfer` is a message's duration. Raises
    RuntimeError if the schedule deadlocks."""
    cost = cost or cost_of_kinds(1.0, 2.0, 1.0)
    todo = [deque(schedule(ranks, rank, micro_batches, chunks)) for rank in range(ranks)]
    ended: dict[tuple[PassKind, int, int], float] = {}
    clock = [0.0] * ranks
    spans: list[Span] = []
    while any(todo):
        before = len(spans)
        for rank, actions in enumerate(todo):
            while actions and (ready := _ready_at(actions[0], rank, ranks, chunks, ended, transfer)) is not None:
                action, start = actions.popleft(), max(clock[rank], ready)
                clock[rank] = start + cost(rank, action)
                spans.append(Span(rank, action, start, clock[rank]))
                ended[action.kind, action.chunk * ranks + rank, action.micro_batch] = clock[rank]
        if len(spans) == before:
            stuck = [f"rank {rank}: {actions[0]}" for rank, actions in enumerate(todo) if actions]
            raise RuntimeError(f"the schedule deadlocks; waiting are {', '.join(stuck)}")
    return Timeline(tuple(spans), ranks, micro_batches, chunks)


def without_transfers(step: Timeline) -> Timeline:
    """Returns a recorded step as if messages took no time, with the same durations and order of passes."""
    in_order = sorted(step.spans, key=lambda span: span.start)
    durations = {(span.rank, span.action): span.end - span.start for span in step.spans}

    def recorded_order(ranks: int, rank: int, micro_batches: int, chunks: int) -> list[Action]:
        return [span.action for span in in_order if span.rank == rank]

    return simulate(
        recorded_order, step.ranks, step.micro_batches, step.chunks, cost=lambda rank, action: durations[rank, action]
    )


def _ready_at(
    action: Action,
    rank: int,
    ranks: int,
    chunks: int,
    ended: Mapping[tuple[PassKind, int, int], float],
    transfer: float,
) -> float | None:
    """Returns the time at which the action's inputs have arrived; None if one of them has not been computed yet."""
    stage, last, m = action.chunk * ranks + rank, chunks * ranks - 1, action.micro_batch
    if action.kind == "F":
        return 0.0 if stage == 0 else _after(ended.get(("F", stage - 1, m)), transfer)
    if action.kind == "W":
        return ended.get(("B", stage, m))
    own = ended.get(("F", stage, m))
    if stage == last or own is None:
        return own
    gradient = _after(ended.get(("B", stage + 1, m)), transfer)
    return None if gradient is None else max(own, gradient)


def _after(time: float | None, transfer: float) -> float | None:
    return None if time is None else time + transfer


# ---------------------------------------------------------------- files of --pipeline-trace DIR


@dataclass(frozen=True)
class _Trace:
    """Content of one rank's file."""

    place: int
    ranks: int
    micro_batches: int
    chunks: int
    steps: tuple[tuple[tuple[str, int, int, float, float], ...], ...]

    def __post_init__(self) -> None:
        if not 0 <= self.place < self.ranks or not 0 < self.micro_batches < INT32 or not 0 < self.chunks < INT32:
            raise ValueError(
                f"invalid counts: stage {self.place} of {self.ranks}, {self.micro_batches} micro-batches, "
                f"{self.chunks} chunks"
            )
        if not self.steps or not all(self.steps):
            raise ValueError("a step has no passes, or there is no step")
        for kind, chunk, micro_batch, start, end in (each for step in self.steps for each in step):
            inside = chunk in range(self.chunks) and micro_batch in range(self.micro_batches)
            if kind not in ("F", "B", "W") or not inside or not -math.inf < start < end < math.inf:
                raise ValueError(f"{kind[:10]} of micro-batch {micro_batch} from {start} to {end} is not a pass")


def read_timelines(directory: Path) -> list[Timeline]:
    """Returns the recorded steps of the directory's first pipeline, oldest first; its data- and tensor-parallel
    replicas are ignored. Times are seconds from the step's first start."""
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
        raise DataError(
            f"--trace {directory}: has only stages {sorted(by_place)} of {first.ranks}; run again with --pipeline-trace"
        )
    shapes = {(t.ranks, t.micro_batches, t.chunks, len(t.steps)) for t in by_place.values()}
    if len(shapes) > 1:
        raise DataError(
            f"--trace {directory}: its stages come from different runs; run again with --pipeline-trace and "
            "an empty directory"
        )
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
