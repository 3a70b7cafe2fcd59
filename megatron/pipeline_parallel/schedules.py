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
    """1F1B whose weight gradients (W) wait, longer on later ranks, and at the end fill what would be bubble.

    A third of 1F1B's bubble where F, B and W take equally long, in the memory of 1F1B's first rank.
    """
    assert chunks == 1, "zero-bubble has one chunk a rank"
    warm_up = min(ranks - rank, micro_batches)
    actions = [Action("F", 0, m) for m in range(warm_up)]
    for m in range(micro_batches):
        actions.append(Action("B", 0, m))
        if m >= rank:
            actions.append(Action("W", 0, m - rank))
        if warm_up + m < micro_batches:
            actions.append(Action("F", 0, warm_up + m))
    late = range(max(0, micro_batches - rank), micro_batches)
    return actions + [Action("W", 0, m) for m in late]


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
