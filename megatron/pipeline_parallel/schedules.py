"""Pipeline schedules as data: the order in which one rank works off its forward and backward passes.

Each schedule is one function of the pipeline's shape. The executor (`executor.py`) runs what they return, the
simulator (`simulate.py`) times it, and neither knows one schedule from another. A rank may hold several chunks of the
model (virtual stages): chunk c of rank r is stage c * ranks + r of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B", "W"]


@dataclass(frozen=True)
class Action:
    """One piece of work. B is the gradient of the input, and of the weights too unless a W of the same follows."""

    kind: Kind
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.chunk}.{self.micro_batch}"


Schedule = Callable[[int, int, int, int], list[Action]]
"""(ranks, rank, micro-batches, chunks per rank) -> that rank's actions, in order."""


def gpipe(ranks: int, rank: int, micro_batches: int, chunks: int) -> list[Action]:
    """All forward passes, then all backward passes: the plainest, and the most memory."""
    assert chunks == 1, "gpipe has one chunk a rank"
    forward = [Action("F", 0, m) for m in range(micro_batches)]
    return forward + [Action("B", 0, m) for m in range(micro_batches)]


def one_forward_one_backward(ranks: int, rank: int, micro_batches: int, chunks: int) -> list[Action]:
    """1F1B: as soon as a gradient can come back it does, so a rank keeps at most `ranks - rank` micro-batches."""
    assert chunks == 1, "1f1b has one chunk a rank"
    forward = [Action("F", 0, m) for m in range(micro_batches)]
    backward = [Action("B", 0, m) for m in range(micro_batches)]
    return _alternate(forward, backward, ranks - rank - 1)


def interleaved(ranks: int, rank: int, micro_batches: int, chunks: int) -> list[Action]:
    """1F1B over chunks: groups of `ranks` micro-batches pass through chunk after chunk; the bubble is 1/chunks as long.

    The micro-batches must divide by the ranks: the schedule of a part of a group would wait for itself."""
    assert micro_batches % ranks == 0, f"{micro_batches} micro-batches in groups of {ranks}"
    forward = list(_in_groups("F", ranks, micro_batches, range(chunks)))
    backward = list(_in_groups("B", ranks, micro_batches, reversed(range(chunks))))
    return _alternate(forward, backward, 2 * (ranks - rank - 1) + (chunks - 1) * ranks)


def zero_bubble(ranks: int, rank: int, micro_batches: int, chunks: int) -> list[Action]:
    """The gradient of the weights (W) waits until there is nothing more urgent, and fills what would be bubble.

    Found by working off the pipeline in unit time: an idle rank prefers a gradient that others wait for, then a
    forward pass while it keeps fewer micro-batches than 1F1B's first rank does, then a W.
    """
    assert chunks == 1, "zero-bubble has one chunk a rank"
    return _zero_bubble_orders(ranks, micro_batches)[rank]


SCHEDULES: dict[str, Schedule] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}


def _alternate(forward: list[Action], backward: list[Action], warm_up: int) -> list[Action]:
    """`warm_up` forward passes, then one forward and one backward in turn, then the rest of the backward passes."""
    warm_up = min(warm_up, len(forward))
    steady = len(forward) - warm_up
    actions = forward[:warm_up]
    for pair in zip(forward[warm_up:], backward[:steady]):
        actions += pair
    return actions + backward[steady:]


def _in_groups(kind: Kind, ranks: int, micro_batches: int, chunks: Iterator[int] | range) -> Iterator[Action]:
    order = list(chunks)
    for start in range(0, micro_batches, ranks):
        for chunk in order:
            for micro_batch in range(start, min(start + ranks, micro_batches)):
                yield Action(kind, chunk, micro_batch)


def _zero_bubble_orders(ranks: int, micro_batches: int) -> list[list[Action]]:
    done: list[dict[Kind, int]] = [{"F": 0, "B": 0, "W": 0} for _ in range(ranks)]  # they go by micro-batch number
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    while any(rank["W"] < micro_batches for rank in done):
        before = [dict(rank) for rank in done]  # what was finished when this unit of time began
        for rank in range(ranks):
            kind = _most_urgent(before, rank, ranks, micro_batches)
            if kind is not None:
                orders[rank].append(Action(kind, 0, done[rank][kind]))
                done[rank][kind] += 1
    return orders


def _most_urgent(done: list[dict[Kind, int]], rank: int, ranks: int, micro_batches: int) -> Kind | None:
    mine = done[rank]
    arrived = micro_batches if rank == 0 else done[rank - 1]["F"]
    returned = mine["F"] if rank == ranks - 1 else min(mine["F"], done[rank + 1]["B"])
    if mine["B"] < returned:
        return "B"
    if mine["F"] < min(arrived, micro_batches) and mine["F"] - mine["W"] < ranks:
        return "F"
    return "W" if mine["W"] < mine["B"] else None
