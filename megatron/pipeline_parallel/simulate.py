"""When each action of a schedule would run: checks that it cannot deadlock, and how much of the time is bubble."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.pipeline_parallel.schedules import Action, Kind, Schedule


@dataclass(frozen=True)
class Span:
    """One action of one rank, from start to end."""

    rank: int
    action: Action
    start: float
    end: float


def simulate(
    schedule: Schedule,
    ranks: int,
    micro_batches: int,
    chunks: int = 1,
    *,
    costs: Mapping[Kind, float] | None = None,
    transfer: float = 0.0,
) -> list[Span]:
    """Every rank works off its list in order, waiting for what it needs. Raises if nobody can go on."""
    costs = costs or {"F": 1.0, "B": 2.0, "W": 1.0}
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
                clock[rank] = start + costs[action.kind]
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
