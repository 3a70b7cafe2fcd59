"""Every collective on the axes of a real layout, against arithmetic on the ranks' numbers."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from megatron.distributed import collectives, launch
from megatron.distributed.parallel_state import ParallelState
from megatron.errors import PeerLostError
from megatron.layout import Layout
from tests.helpers.distributed import RankFailed, run_ranks

LAYOUT = Layout(4, tp=2)


def all_collectives(rank: int) -> dict[str, Any]:
    state = ParallelState.build(LAYOUT, rank, timedelta(seconds=30))
    found: dict[str, Any] = {}
    for axis in (state.tp, state.dp, state.world):
        pending = collectives.start_all_reduce(later := torch.tensor([2.0 * rank]), axis)
        collectives.barrier(axis)
        pending.wait()
        found[axis.name] = {
            "sum": collectives.all_reduce(torch.tensor([1.0 * rank, 1.0]), axis).tolist(),
            "max": collectives.all_reduce(torch.tensor([1.0 * rank]), axis, "max").item(),
            "min": collectives.all_reduce(torch.tensor([1.0 * rank]), axis, "min").item(),
            "later": later.item(),
            "first": collectives.broadcast(torch.tensor([10.0 * rank]), axis).item(),
            "last": collectives.broadcast(torch.tensor([10.0 * rank]), axis, axis.size - 1).item(),
            "gathered": [part.item() for part in collectives.all_gather(torch.tensor([10.0 * rank]), axis)],
        }
    return found


def expected(rank: int) -> dict[str, Any]:
    found = {}
    for name in ("tp", "dp", "world"):
        ranks = LAYOUT.group_of(name, rank)
        found[name] = {
            "sum": [float(sum(ranks)), float(len(ranks))],
            "max": max(ranks),
            "min": min(ranks),
            "later": 2.0 * sum(ranks),
            "first": 10.0 * ranks[0],
            "last": 10.0 * ranks[-1],
            "gathered": [10.0 * other for other in ranks],
        }
    return found


def test_collectives_over_tp_dp_and_world() -> None:
    assert run_ranks(4, all_collectives) == [expected(rank) for rank in range(4)]


def test_planted_bug_the_wrong_group_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    build = ParallelState.build
    monkeypatch.setattr(
        ParallelState,
        "build",
        staticmethod(lambda layout, rank, timeout: build(Layout(4, pp=2), rank, timeout)),
    )
    assert run_ranks(4, all_collectives) != [expected(rank) for rank in range(4)]


def two_states(rank: int) -> tuple[float, float]:
    """Two layouts in one process do not disturb each other."""
    one = ParallelState.build(Layout(4, tp=2), rank)
    two = ParallelState.build(Layout(4, tp=4), rank)
    return (
        collectives.all_reduce(torch.tensor([1.0 * rank]), one.tp).item(),
        collectives.all_reduce(torch.tensor([1.0 * rank]), two.tp).item(),
    )


def test_two_states_live_side_by_side() -> None:
    assert run_ranks(4, two_states) == [(1.0, 6.0), (1.0, 6.0), (5.0, 6.0), (5.0, 6.0)]


def waits_for_nobody(rank: int) -> float:
    """Fails in time if the other member never joins the collective."""
    state = ParallelState.build(Layout(4, tp=2), rank, timedelta(seconds=1))
    begin = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)timed out"):
            collectives.all_reduce(torch.ones(1), state.tp)
    return time.monotonic() - begin


def test_groups_keep_the_timeout_they_were_built_with() -> None:
    assert 0.5 < run_ranks(4, waits_for_nobody)[0] < 10


def leaves_too_early(rank: int) -> str:
    """Rank 0 does not reach the shutdown in time."""
    begin, said = time.monotonic(), "left"
    if rank == 0:
        time.sleep(2)
        launch.shutdown(barrier=False)
    else:
        with pytest.raises(PeerLostError) as error:
            launch.shutdown(timeout=timedelta(seconds=1))
        said = str(error.value)
    assert not torch.distributed.is_initialized() and time.monotonic() - begin < 10
    return said


def test_shutdown_waits_in_bound() -> None:
    zero, one = run_ranks(2, leaves_too_early)
    assert zero == "left" and "rank 1 waited 1 s for the others" in one


def leaves(rank: int) -> bool:
    state = ParallelState.build(Layout(2), rank)
    launch.shutdown()
    launch.shutdown()  # a second time is nothing
    with pytest.raises(RuntimeError, match="was destroyed"):
        collectives.barrier(state.dp)
    return True


def test_after_shutdown_an_axis_has_no_group() -> None:
    assert run_ranks(2, leaves) == [True, True]


class TestHelper:
    """Mistakes that run_ranks itself must report."""

    def test_a_rank_that_returns_nothing_fails(self) -> None:
        with pytest.raises(RankFailed, match="rank 1 returned None"):
            run_ranks(2, lambda rank: 1 if rank == 0 else None)

    def test_an_exception_is_reported_with_its_rank(self) -> None:
        def body(rank: int) -> int:
            if rank == 1:
                raise ValueError("the cause")
            torch.distributed.barrier()
            return 1

        with pytest.raises(RankFailed, match=r"(?s)rank 1 failed.*the cause"):
            run_ranks(2, body, timeout=20)

    def test_a_rank_that_dies_fails(self) -> None:
        with pytest.raises(RankFailed, match="rank 0 died with exit code 3"):
            run_ranks(2, lambda rank: os._exit(3) if rank == 0 else 1, timeout=20)

    def test_a_rank_that_hangs_fails(self) -> None:
        with pytest.raises(RankFailed, match="did not finish"):
            run_ranks(2, lambda rank: time.sleep(60) if rank == 0 else 1, timeout=2)

    def test_results_come_in_the_order_of_ranks(self) -> None:
        results = run_ranks(3, lambda rank, factor: torch.tensor(rank * factor), 2)
        assert [value.item() for value in results] == [0, 2, 4]

    def test_beside_another_process_of_tests_they_keep_to_its_share_of_the_cores(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = os.sched_getaffinity(0)
        for worker in (0, 1):
            monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{worker}")
            monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "2")
            share = sorted(before)[worker::2] or sorted(before)
            assert run_ranks(1, lambda rank: sorted(os.sched_getaffinity(0))) == [share]
        assert os.sched_getaffinity(0) == before
