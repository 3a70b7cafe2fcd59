"""Pipelines of 2 to 16 stages never hang under the rules of NCCL and CUDA, in any schedule. The order of operations
that ensures this costs no time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from megatron.pipeline_parallel.links import Links
from megatron.pipeline_parallel.pipeline import _Execution
from megatron.pipeline_schedules import SCHEDULES, Action, one_forward_one_backward, schedule_of
from megatron.prove.order.agreement import disagreements
from megatron.prove.order.events import Op, Recording, Wait
from megatron.prove.order.waits import INDEPENDENT, LAUNCH_BLOCKS, ONE_QUEUE, STRICTEST, Rules, play
from megatron.report.pipeline_timeline import cost_of_kinds, simulate
from tests.cluster.pipelines import record_pipeline

TRANSFER = 0.05  # of a stage's forward pass: slow
STEPS = 2  # the first one, and one with all links in use


def shapes(name: str) -> Iterator[tuple[int, int, int]]:
    """(ranks, micro-batches, chunks): fewer micro-batches than stages, as many, and more."""
    for ranks in (2, 3, 4, 5, 8, 16):
        if name == "interleaved":
            yield from ((ranks, ranks * groups, chunks) for groups, chunks in ((1, 2), (2, 3)))
        else:
            yield from ((ranks, count, 1) for count in (1, ranks + 1, 2 * ranks))


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_pipeline_hangs(name: str) -> None:
    for ranks, micro_batches, chunks in shapes(name):
        recordings = record_pipeline(name, ranks, micro_batches, chunks, STEPS)
        assert disagreements(recordings) == []
        for rules in (STRICTEST, ONE_QUEUE, INDEPENDENT):
            assert play(recordings, rules).stuck == [], (ranks, micro_batches, chunks, rules)


@pytest.mark.parametrize("shape", [(2, 5, 2, 3), (2, 7, 3, 5), (4, 12, 2, 6), (4, 9, 2, 5), (5, 6, 2, 6)])
def test_no_pipeline_hangs_or_waits_in_larger_groups(shape: tuple[int, int, int, int]) -> None:
    """(ranks, micro-batches, chunks, group). With one queue, a receive that was posted early delays what follows."""
    ranks, micro_batches, chunks, group = shape
    recordings = record_pipeline("interleaved", ranks, micro_batches, chunks, STEPS, group)
    assert disagreements(recordings) == []
    for rules in (STRICTEST, ONE_QUEUE, INDEPENDENT):
        assert play(recordings, rules).stuck == []
    step, cost = record_pipeline("interleaved", ranks, micro_batches, chunks, group=group), cost_of_kinds(1.0, 2.0)
    paper = simulate(schedule_of("interleaved", group), ranks, micro_batches, chunks, cost=cost, transfer=TRANSFER).end
    for rules, more in ((INDEPENDENT, 0.01), (ONE_QUEUE, 0.04)):
        assert play(step, rules, TRANSFER / chunks).seconds - 4 * TRANSFER / chunks <= paper / chunks * (1 + more)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("rules", [INDEPENDENT, ONE_QUEUE], ids=["own queues", "one queue"])
def test_no_time_is_lost_to_the_order(name: str, rules: Rules) -> None:
    """The recorded pipeline takes as long as its schedule on paper, which waits for data only."""
    backward = 1.0 if name == "zero-bubble" else 2.0
    for ranks, groups in ((2, 4), (4, 4), (8, 2)):
        chunks = 2 if name == "interleaved" else 1
        recordings = record_pipeline(name, ranks, ranks * groups, chunks)
        cost = cost_of_kinds(1.0 / chunks, backward / chunks, 1.0)
        paper = simulate(SCHEDULES[name], ranks, ranks * groups, chunks, cost=cost, transfer=TRANSFER).end
        connecting = 4 * TRANSFER  # two links in turn for either kind of message
        taken = play(recordings, rules, TRANSFER).seconds - connecting
        assert taken == pytest.approx(paper, rel=1e-3 if name != "interleaved" else 0.01), (ranks, groups)


# What the proof is worth: what was wrong before, and other mistakes, are found.


def with_one_group_a_kind(recordings: Mapping[int, Recording]) -> dict[int, Recording]:
    result = {}
    for rank, each in recordings.items():
        kind = {name: group.what for name, group in each.groups.items()}
        groups = {
            kind[name]: replace(group, name=kind[name], ranks=(0, 1, 2, 3)) for name, group in each.groups.items()
        }
        events = [replace(event, group=kind[event.group]) if isinstance(event, Op) else event for event in each.events]
        result[rank] = Recording(rank, groups, events)
    return result


def stuck(recordings: Mapping[int, Recording], rules: Rules) -> str:
    return "\n".join(play(recordings, rules).stuck)


@pytest.mark.parametrize("name", SCHEDULES)
def test_launches_that_block_hang_a_pipeline(name: str) -> None:
    """Shows why CUDA_LAUNCH_BLOCKING=1 is rejected."""
    found = stuck(record_pipeline(name, 2, 4, 2 if name == "interleaved" else 1), LAUNCH_BLOCKS)
    assert "rank 0 waits for receive from rank 1" in found, found


def test_planted_links_that_connect_in_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 0's first operation receives a gradient, stage 1's an activation."""
    monkeypatch.setattr(Links, "connect", lambda self, device: None)
    recordings = record_pipeline("1f1b", 4, 8)
    found = stuck(recordings, INDEPENDENT)
    assert "rank 0 connects for receive from rank 1" in found and "on pp gradient" in found
    assert "rank 1 connects for receive from rank 0" in found and "on pp activation" in found
    assert stuck(recordings, Rules(first_use_blocks=False)) == ""


def test_planted_two_receives_ahead_hang_where_streams_share_a_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = _Execution.__init__

    def eager(self: _Execution, *given: Any) -> None:
        begin(self, *given)
        for what in ("activation", "gradient"):
            later = [(action, message) for action, to_come in self._arrivals.items() for message in to_come]
            for action, message in [(action, message) for action, message in later if message.what == what][:1]:
                self._arrivals[action].remove(message)
                self._arrivals[None].append(message)
        self._expect_during(None)

    monkeypatch.setattr(_Execution, "__init__", eager)
    recordings = record_pipeline("1f1b", 4, 8)
    assert stuck(recordings, INDEPENDENT) == ""
    found = stuck(recordings, ONE_QUEUE)
    assert "rank 0 waits for receive from rank 1" in found and "missing: rank 1" in found


def test_planted_one_group_for_all_links_of_a_kind() -> None:
    """A send queues behind the receive that was issued before it on the same communicator."""
    found = stuck(with_one_group_a_kind(record_pipeline("zero-bubble", 4, 8)), INDEPENDENT)
    assert "rank 1 waits for receive from rank 2" in found and "rank 2 waits for receive from rank 1" in found, found


def test_planted_a_schedule_that_deadlocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(ranks: int, rank: int, micro_batches: int, chunks: int) -> list[Action]:
        """Stage 1 runs forward where the others run backward."""
        actions = one_forward_one_backward(ranks, rank, micro_batches, chunks)
        return sorted(actions, key=lambda action: action.kind == "B") if rank == 1 else actions

    monkeypatch.setitem(SCHEDULES, "1f1b", hasty)
    found = stuck(record_pipeline("1f1b", 3, 8), INDEPENDENT)
    assert "rank 0 waits for receive from rank 1" in found and "rank 1 waits for receive from rank 0" in found, found


def test_planted_a_stage_that_runs_ahead_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs two micro-batches per stage, as here. With two more than stages, to which `check_layout.py --cluster` cuts
    a long pipeline, the stage merely runs all forward passes first; no queue hangs."""

    def ahead(ranks: int, rank: int, micro_batches: int, chunks: int) -> list[Action]:
        actions = one_forward_one_backward(ranks, rank, micro_batches, chunks)
        early = [action for action in actions if action.kind == "F"][: ranks + 4] if rank == 0 else []
        return early + [action for action in actions if action not in early]

    monkeypatch.setitem(SCHEDULES, "1f1b", ahead)
    assert "rank 0 waits for " in stuck(record_pipeline("1f1b", 4, 8), ONE_QUEUE)
    assert stuck(record_pipeline("1f1b", 4, 6), ONE_QUEUE) == ""


def test_planted_groups_in_another_order_whatever_their_names() -> None:
    recordings = record_pipeline("1f1b", 2, 2)
    turned = dict(reversed(recordings[1].groups.items()))
    first = disagreements({**recordings, 1: replace(recordings[1], groups=turned)})[0]
    assert first.startswith("ranks create groups in different orders: number 0 is world "), first


def test_planted_a_swapped_receive_is_found() -> None:
    """The tensors have the same shape, so NCCL would silently deliver the wrong ones."""
    recordings = record_pipeline("1f1b", 3, 6)
    events = list(recordings[1].events)
    first, second = [
        place
        for place, event in enumerate(events)
        if isinstance(event, Op) and event.messages[0].side == "recv" and event.messages[0].tag in (2, 2 + (1 << 13))
    ]
    one, other = events[first], events[second]
    assert isinstance(one, Op) and isinstance(other, Op)
    events[first], events[second] = replace(one, messages=other.messages), replace(other, messages=one.messages)
    (found,) = disagreements({**recordings, 1: replace(recordings[1], events=events)})
    assert found.startswith("message 2 from rank 0 to rank 1 on pp activation"), found


def test_planted_a_wait_left_out_is_found() -> None:
    recordings = record_pipeline("1f1b", 2, 2)
    last = [event for event in recordings[0].events if isinstance(event, Wait)][-3:]
    events = [event for event in recordings[0].events if event not in last]
    (found,) = disagreements({**recordings, 0: replace(recordings[0], events=events)})
    assert found.startswith("rank 0 never waits for receive from rank 1"), found
