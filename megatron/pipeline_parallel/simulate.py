"""When each action of a schedule would run: checks that it cannot deadlock, and how much of the time is bubble."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron.pipeline_parallel.schedules import Action, Kind, Schedule


@dataclass(frozen=True)
class Span:
    """One action of one rank, from start to end."""

    rank: int
    action: Action
    start: float
    end: float


Cost = Callable[[int, Action], float]
"""(rank, action) -> how long it takes."""


def cost_of_kinds(forward: float, backward: float, weights: float = 0.0) -> Cost:
    """The same for all stages and micro-batches."""
    costs: dict[Kind, float] = {"F": forward, "B": backward, "W": weights}
    return lambda rank, action: costs[action.kind]


def simulate(
    schedule: Schedule,
    ranks: int,
    micro_batches: int,
    chunks: int = 1,
    *,
    cost: Cost | None = None,
    transfer: float = 0.0,
) -> list[Span]:
    """Every rank works off its list in order, waiting for what it needs. Raises if nobody can go on."""
    cost = cost or cost_of_kinds(1.0, 2.0, 1.0)
    todo = [schedule(ranks, rank, micro_batches, chunks) for rank in range(ranks)]
    ended: dict[tuple[Kind, int, int], float] = {}
    clock, position, spans = [0.0] * ranks, [0] * ranks, []
    while any(position[rank] < len(todo[rank]) for rank in range(ranks)):
        moved = False
        for rank in range(ranks):
            while position[rank] < len(todo[rank]):
                action = todo[rank][position[rank]]
                ready = _ready_at(action, rank, ranks, chunks, ended, transfer)
                if ready is None:
                    break
                start = max(clock[rank], ready)
                clock[rank] = start + cost(rank, action)
                spans.append(Span(rank, action, start, clock[rank]))
                ended[action.kind, action.chunk * ranks + rank, action.micro_batch] = clock[rank]
                position[rank] += 1
                moved = True
        if not moved:
            stuck = [
                f"rank {rank}: {todo[rank][position[rank]]}"
                for rank in range(ranks)
                if position[rank] < len(todo[rank])
            ]
            raise RuntimeError(f"the schedule cannot go on; waiting are {', '.join(stuck)}")
    return spans


def without_delays(spans: Sequence[Span], ranks: int, micro_batches: int, chunks: int) -> list[Span]:
    """The passes of a real step, as long and in the order as they ran, if messages took no time."""
    in_order = sorted(spans, key=lambda span: span.start)
    lasted = {(span.rank, span.action): span.end - span.start for span in spans}

    def as_it_ran(ranks: int, rank: int, micro_batches: int, chunks: int) -> list[Action]:
        return [span.action for span in in_order if span.rank == rank]

    return simulate(as_it_ran, ranks, micro_batches, chunks, cost=lambda rank, action: lasted[rank, action])


def _ready_at(
    action: Action,
    rank: int,
    ranks: int,
    chunks: int,
    ended: Mapping[tuple[Kind, int, int], float],
    transfer: float,
) -> float | None:
    """When what the action needs is there; None if it is not known yet."""
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


def bubble(spans: Sequence[Span], ranks: int) -> float:
    """Idle time over busy time, of all ranks from the first start to the last end."""
    busy = sum(span.end - span.start for span in spans)
    whole = ranks * (max(span.end for span in spans) - min(span.start for span in spans))
    return (whole - busy) / busy


def theoretical_bubble(ranks: int, micro_batches: int, chunks: int = 1, *, queued: bool = False) -> float:
    """(p - 1) / (m v) for GPipe, 1F1B and the interleaved schedule with equal stages. `queued`: (p - 1) / (3 m), where
    the weights' gradients fill the bubble and a micro-batch's three parts take equally long."""
    return (ranks - 1) / (micro_batches * (3 if queued else chunks))


def most_in_flight(actions: Sequence[Action]) -> int:
    """How many forward passes one rank keeps at most: they end with their W where there is one, else with their B."""
    ends = "W" if any(action.kind == "W" for action in actions) else "B"
    now = most = 0
    for action in actions:
        now += (action.kind == "F") - (action.kind == ends)
        most = max(most, now)
    return most
