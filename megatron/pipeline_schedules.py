"""Pipeline schedules as data: the order in which one rank runs its forward and backward passes.

Each schedule is a function of the pipeline's shape that returns a list of actions. Any such list is executed by
`pipeline_parallel/pipeline.py` and timed by `report/pipeline_timeline.py`. A rank may hold several chunks of the model
(virtual stages): chunk c of rank r is stage c * ranks + r of the model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

PassKind = Literal["F", "B", "W"]


@dataclass(frozen=True)
class Action:
    """One pass: F is forward, B is backward. B includes the weight gradients unless a W of the same chunk and
    micro-batch follows, which computes them."""

    kind: PassKind
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.chunk}.{self.micro_batch}"


Order = Callable[[int, int, int, int], list[Action]]
"""(ranks, rank, micro-batches, chunks per rank) -> that rank's actions, in order."""


@dataclass(frozen=True)
class PipelineSchedule:
    """Schedule, with the properties that other parts of the program need."""

    order: Order
    interleaves: bool = False
    """True if a rank has several chunks of the model, and micro-batches pass through the chunks in groups."""
    defers_wgrads: bool = False
    """True if weight gradients are computed in separate passes (W), after the backward pass."""
    keeps_all: bool = False
    """True if all forward passes come before the first backward pass, so that every micro-batch's activations are
    kept."""

    def __call__(self, ranks: int, rank: int, micro_batches: int, chunks: int) -> list[Action]:
        return self.order(ranks, rank, micro_batches, chunks)


def fills_groups(micro_batches: int, group: int, ranks: int) -> bool:
    """True if the interleaved schedule can take the micro-batches in groups of `group`. The last group may be smaller,
    but no group has fewer than one micro-batch per pipeline rank."""
    rest = micro_batches % group
    return ranks <= group <= micro_batches and (rest == 0 or rest >= ranks)


def gpipe(ranks: int, rank: int, micro_batches: int, chunks: int) -> list[Action]:
    """GPipe: all forward passes, then all backward passes. Keeps the activations of every micro-batch."""
    assert chunks == 1, "gpipe has one chunk per rank"
    forward = [Action("F", 0, m) for m in range(micro_batches)]
    return forward + [Action("B", 0, m) for m in range(micro_batches)]


def one_forward_one_backward(ranks: int, rank: int, micro_batches: int, chunks: int) -> list[Action]:
    """1F1B: each backward pass runs as early as possible, so a rank keeps the activations of `ranks - rank`
    micro-batches at most."""
    assert chunks == 1, "1f1b has one chunk per rank"
    forward = [Action("F", 0, m) for m in range(micro_batches)]
    backward = [Action("B", 0, m) for m in range(micro_batches)]
    return _alternate(forward, backward, ranks - rank - 1)


def interleaved(ranks: int, rank: int, micro_batches: int, chunks: int, group: int | None = None) -> list[Action]:
    """1F1B over several chunks per rank: groups of `group` micro-batches (default: `ranks`) go through one chunk after
    another, which divides the bubble by the number of chunks. A group of fewer than `ranks` would deadlock."""
    group = group or ranks
    assert fills_groups(micro_batches, group, ranks), f"{micro_batches} micro-batches in groups of {group}"
    forward = list(_in_groups("F", group, micro_batches, range(chunks)))
    backward = list(_in_groups("B", group, micro_batches, reversed(range(chunks))))
    return _alternate(forward, backward, 2 * (ranks - rank - 1) + (chunks - 1) * group)


def zero_bubble(ranks: int, rank: int, micro_batches: int, chunks: int) -> list[Action]:
    """1F1B with deferred weight gradients (W), which fill the idle time at the end of the step.

    If F, B and W take equally long, the bubble is a third of that of 1F1B. No rank needs more memory than the first
    rank needs under 1F1B.
    """
    assert chunks == 1, "zero-bubble has one chunk per rank"
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


SCHEDULES: dict[str, PipelineSchedule] = {
    "gpipe": PipelineSchedule(gpipe, keeps_all=True),
    "1f1b": PipelineSchedule(one_forward_one_backward),
    "interleaved": PipelineSchedule(interleaved, interleaves=True),
    "zero-bubble": PipelineSchedule(zero_bubble, defers_wgrads=True),
}


def schedule_of(name: str, group: int | None = None) -> Order:
    """Returns the schedule called `name`. `group`: number of micro-batches in a group of the interleaved schedule."""
    return SCHEDULES[name] if group is None else partial(interleaved, group=group)


def _alternate(forward: list[Action], backward: list[Action], warm_up: int) -> list[Action]:
    """Returns `warm_up` forward passes, then one forward and one backward in turn, then the other backward passes."""
    warm_up = min(warm_up, len(forward))
    steady = len(forward) - warm_up
    actions = forward[:warm_up]
    for pair in zip(forward[warm_up:], backward[:steady]):
        actions += pair
    return actions + backward[steady:]


def _in_groups(kind: PassKind, group: int, micro_batches: int, chunks: Iterator[int] | range) -> Iterator[Action]:
    order = list(chunks)
    for start in range(0, micro_batches, group):
        for chunk in order:
            for micro_batch in range(start, min(start + group, micro_batches)):
                yield Action(kind, chunk, micro_batch)
