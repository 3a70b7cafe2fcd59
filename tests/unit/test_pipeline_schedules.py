"""Every schedule is complete and free of deadlocks, and has the bubble and memory that theory predicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product

import pytest

from megatron.config import ParallelConfig
from megatron.config.stages import split_layers, stage_layers
from megatron.pipeline_schedules import SCHEDULES, Action, PipelineSchedule, schedule_of
from megatron.report.pipeline_timeline import Timeline, cost_of_kinds, simulate, without_transfers

RANKS = range(2, 9)
EQUAL_PARTS = cost_of_kinds(1.0, 1.0, 1.0)  # of a backward pass in two


def shapes(name: str) -> list[tuple[int, int, int]]:
    """(ranks, micro-batches, chunks)"""
    if name == "interleaved":
        return [(p, p * groups, v) for p in RANKS for groups in range(1, 5) for v in (1, 2, 3)]
    return [(p, m, 1) for p in RANKS for m in range(1, 20)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_pass_once_and_no_deadlock(name: str) -> None:
    schedule = SCHEDULES[name]
    kinds = "FBW" if name == "zero-bubble" else "FB"
    for ranks, micro_batches, chunks in shapes(name):
        for rank in range(ranks):
            found = Counter(schedule(ranks, rank, micro_batches, chunks))
            every = {Action(k, c, m) for k in kinds for c in range(chunks) for m in range(micro_batches)}  # type: ignore[arg-type]
            assert found == Counter(every)
        simulate(schedule, ranks, micro_batches, chunks)  # raises if no rank can continue


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_the_bubble_is_that_of_theory(name: str) -> None:
    for ranks, micro_batches, chunks in shapes(name):
        step = simulate(SCHEDULES[name], ranks, micro_batches, chunks)
        theory = (ranks - 1) / (micro_batches * chunks)
        assert step.bubble == pytest.approx(theory) and step.theoretical_bubble == pytest.approx(theory)


def grouped() -> Iterator[tuple[int, int, int, int]]:
    """(ranks, micro-batches, chunks, group): every legal combination up to some size."""
    for ranks, chunks in product((2, 3, 4), (2, 3)):
        for group, micro_batches in product(range(ranks, 8), range(ranks, 20)):
            if group <= micro_batches and not 0 < micro_batches % group < ranks:
                yield ranks, micro_batches, chunks, group


def megatron_order(micro_batches: int, chunks: int, group: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) of the forward passes, in the order of get_schedule_table in Megatron-LM's schedules.py."""
    table = []
    for first in range(0, micro_batches, group):
        last = micro_batches if first + group >= micro_batches else first + group
        table += [(micro_batch, chunk) for chunk in range(chunks) for micro_batch in range(first, last)]
    return table


def test_groups_of_any_size_have_the_order_of_megatron() -> None:
    for ranks, micro_batches, chunks, group in grouped():
        schedule = schedule_of("interleaved", group)
        for rank in range(ranks):
            actions = schedule(ranks, rank, micro_batches, chunks)
            forward = [(a.micro_batch, a.chunk) for a in actions if a.kind == "F"]
            backward = [(a.micro_batch, chunks - 1 - a.chunk) for a in actions if a.kind == "B"]
            assert forward == backward == megatron_order(micro_batches, chunks, group)
            warm_up = next(place for place, action in enumerate(actions) if action.kind == "B") - 1
            late = 2 * (ranks - rank - 1) + (chunks - 1) * group  # get_pp_rank_microbatches there
            assert warm_up == min(late, micro_batches * chunks - 1)
        step = simulate(schedule, ranks, micro_batches, chunks)  # raises if no rank can continue
        assert step.bubble == pytest.approx(step.theoretical_bubble)
        if group == ranks:
            assert step == simulate(SCHEDULES["interleaved"], ranks, micro_batches, chunks)


def test_a_last_group_smaller_than_the_pipeline_is_not_run() -> None:
    with pytest.raises(AssertionError, match="5 micro-batches in groups of 4"):
        schedule_of("interleaved", 4)(2, 0, 5, 2)


def test_zero_bubble_has_a_third_of_the_bubble() -> None:
    for ranks in RANKS:
        for micro_batches in (2 * ranks, 3 * ranks + 1):
            step = simulate(SCHEDULES["zero-bubble"], ranks, micro_batches, cost=EQUAL_PARTS)
            theory = (ranks - 1) / (micro_batches * 3)
            assert step.bubble == pytest.approx(theory) and step.theoretical_bubble == pytest.approx(theory)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_what_messages_cost_is_taken_out_of_a_real_step(name: str) -> None:
    """Replaying a step with slow messages without them gives the step that had none, whatever the passes cost."""
    chunks = 2 if name == "interleaved" else 1

    def cost(rank: int, action: Action) -> float:
        return 1.0 + rank / 8 + action.micro_batch / 64 + (action.kind == "B")

    late = simulate(SCHEDULES[name], 3, 6, chunks, cost=cost, transfer=0.25)
    prompt = simulate(SCHEDULES[name], 3, 6, chunks, cost=cost)
    assert late.bubble > prompt.bubble

    def exact(step: Timeline) -> list[tuple[int, str, float]]:
        return sorted((s.rank, str(s.action), round(s.start, 9)) for s in step.spans)

    assert exact(without_transfers(late)) == exact(prompt)


def most_in_flight(actions: list[Action]) -> int:
    """Most micro-batches whose activations a rank holds: until their W if they have one, otherwise until their B."""
    ends = "W" if any(action.kind == "W" for action in actions) else "B"
    now = most = 0
    for action in actions:
        now += (action.kind == "F") - (action.kind == ends)
        most = max(most, now)
    return most


def test_memory() -> None:
    for ranks in RANKS:
        for rank in range(ranks):
            assert most_in_flight(SCHEDULES["gpipe"](ranks, rank, 32, 1)) == 32
            assert most_in_flight(SCHEDULES["1f1b"](ranks, rank, 32, 1)) == ranks - rank
            assert most_in_flight(SCHEDULES["zero-bubble"](ranks, rank, 32, 1)) <= ranks


def test_planted_bug_a_backward_pass_too_early() -> None:
    def hasty(ranks: int, rank: int, micro_batches: int, chunks: int) -> list[Action]:
        actions = SCHEDULES["1f1b"](ranks, rank, micro_batches, chunks)
        if rank == 0:  # waits for a gradient before it has sent what the gradient is of
            first = actions.index(Action("B", 0, 0))
            actions.insert(0, actions.pop(first))
        return actions

    broken: PipelineSchedule = hasty
    with pytest.raises(RuntimeError, match=r"rank 0: B0\.0"):
        simulate(broken, 4, 8)


def test_layers_of_the_stages() -> None:
    assert split_layers(6, 3).stages == (range(0, 2), range(2, 4), range(4, 6))
    uneven = split_layers(7, 3, first=1, last=2)
    assert uneven.stages == (range(0, 1), range(1, 5), range(5, 7))
    # Megatron's rule: chunk v on stage p starts at layer v * (L / V) + p * (L / (V * PP)).
    virtual = stage_layers(8, ParallelConfig(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=2))
    assert virtual.of_rank(0) == [range(0, 2), range(4, 6)] and virtual.of_rank(1) == [range(2, 4), range(6, 8)]
