"""Lost ranks, slow ranks, mismatched collectives and deadlocks are distinguished by what ranks publish."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from megatron.distributed.collectives import start_all_reduce
from megatron.distributed.comm_log import CommLog, CommOp
from megatron.distributed.failure_detection import (
    RankStatus,
    deadlock,
    mismatched_collectives,
    visible_process_state,
    why_lost,
)
from megatron.distributed.store_values import encode_recent, encode_status, parse_recent, parse_status
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import flags, make_run

WORLD = (0, 1)


def status(rank: int, waiting: CommOp | None = None, **more: Any) -> RankStatus:
    values = {
        "number": 1,
        "host": "a",
        "pid": 1,
        "pid_namespace": "n",
        "step": 3,
        "phase": "forward-backward",
        "idle": 30.0,
    }
    return RankStatus(rank=rank, waiting=waiting, **{**values, **more})


def reduce(number: int, axis: str = "dp", ranks: tuple[int, ...] = WORLD, shape: tuple[int, ...] = (4,)) -> CommOp:
    return CommOp("all_reduce", axis, ranks, number, shape)


def received(sent: RankStatus, world: int) -> RankStatus:
    got = parse_status(encode_status(sent).encode(), sent.rank, world)
    assert isinstance(got, RankStatus), got
    return got


def test_a_status_survives_encoding() -> None:
    sent = status(1, reduce(7), last=reduce(6), counts={"dp": 7}, recent={"dp": [reduce(6), reduce(7)]})
    got = received(sent, 2)
    assert encode_status(got) == encode_status(sent)
    assert parse_recent(encode_recent(sent.recent).encode(), 2) == {
        "dp": [replace(reduce(n), ranks=range(2)) for n in (6, 7)]
    }
    assert (got.waiting, list(got.waiting.ranks if got.waiting else ())) == (replace(reduce(7), ranks=range(2)), [0, 1])
    for ranks in ((3,), (0, 4, 8), (0, 1, 8, 9), tuple(range(8192))):
        sent = status(1, reduce(7, ranks=ranks))
        waiting = received(sent, 8192).waiting
        assert waiting is not None and tuple(waiting.ranks) == ranks and len(encode_status(sent)) < 400
    assert str(got) == "step 3, forward-backward, in all_reduce 7 of [4] over dp"


@pytest.mark.parametrize(
    ("silent", "process", "state", "lost"),
    [
        (1.0, "", "alive", True),  # gone
        (1.0, "Z", "alive", True),
        (99.0, "", "left", False),  # it had done its work
        (99.0, "R", "alive", False),  # alive and silent: slow
        (1.0, "T", "alive", False),
        (21.0, "T", "alive", True),
        (19.0, None, "alive", False),  # on another machine
        (21.0, None, "alive", True),
        (1.0, "", "failed", False),  # it says its error itself
        (11.0, "", "failed", True),
    ],
)
def test_who_is_lost(silent: float, process: str | None, state: Any, lost: bool) -> None:
    assert (why_lost(status(1, state=state), silent, process, 20.0) is not None) == lost


def test_the_kernel_knows_this_process() -> None:
    mine = status(0, pid=os.getpid())
    assert visible_process_state(mine, "a", "n") in ("R", "S")
    assert visible_process_state(replace(mine, pid=2**22 + 1), "a", "n") == ""
    assert (
        visible_process_state(mine, "another host", "n") is None
        and visible_process_state(mine, "a", "another container") is None
    )


def test_ranks_out_of_step_are_named() -> None:
    ours = status(0, recent={"dp": [reduce(1), reduce(2)]})
    assert mismatched_collectives([ours, status(1, recent={"dp": [reduce(2), reduce(3)]})]) is None
    found = mismatched_collectives([ours, status(1, recent={"dp": [reduce(2, shape=(9,))]})])
    assert found is not None and "rank 0 and rank 1 are out of step" in found and "all_reduce 2 of [9] over dp" in found
    elsewhere = status(1, recent={"dp": [reduce(2, ranks=(1, 3), shape=(9,))]})
    assert mismatched_collectives([ours, elsewhere]) is None  # another group of that axis


def test_a_deadlock_is_found_and_work_is_not() -> None:
    skipped = [
        status(0, reduce(5), counts={"dp": 5, "tp": 1}),
        status(1, CommOp("barrier", "tp", WORLD, 2), counts={"dp": 4, "tp": 2}),
    ]
    found = deadlock(skipped, 2, 20.0)
    assert found is not None and "rank 0 in all_reduce 5" in found and "which rank 1 has not begun" in found
    under_way = [replace(skipped[0], waiting=reduce(4)), skipped[1]]
    assert deadlock(under_way, 2, 20.0) is None
    computing = [skipped[0], replace(skipped[1], waiting=None)]
    assert deadlock(computing, 2, 20.0) is None
    recently = [skipped[0], replace(skipped[1], idle=3.0)]
    assert deadlock(recently, 2, 20.0) is None
    assert deadlock(skipped, 3, 20.0) is None  # a rank that did not tell


def test_ranks_that_wait_for_their_devices_are_out_of_step_only_if_they_have_begun_other_numbers() -> None:
    reading = CommOp("reading the outcome of step 3", "", (0,), on_device=True)
    ranks = [status(rank, reading, counts={"dp": 5}, recent={"dp": [reduce(5)]}) for rank in WORLD]
    assert deadlock(ranks, 2, 20.0) is None, "a long step"
    ahead = [ranks[0], replace(ranks[1], counts={"dp": 6}, recent={"dp": [reduce(6)]})]
    found = deadlock(ahead, 2, 20.0)
    assert found is not None and "rank 1 has begun 6 collectives over dp (step 3, forward-backward, in reading" in found
    assert deadlock([ahead[0], replace(ahead[1], waiting=None)], 2, 20.0) is None
    assert deadlock([ahead[0], replace(ahead[1], idle=1.0)], 2, 20.0) is None
    got = received(ranks[0], 2).waiting
    assert got is not None and got.on_device and str(got) == "reading the outcome of step 3"


def test_two_stages_that_wait_for_each_others_messages() -> None:
    message = CommOp("receive the gradient of micro-batch 3 for stage 0", "pp", WORLD)
    found = deadlock([status(0, message), status(1, message)], 2, 20.0)
    assert found is not None and "micro-batch 3" in found


def noted(rank: int, world_size: int) -> tuple[str, str | None, bool]:
    """State of the log before, during and after a wait."""
    import torch

    from megatron.config import parse_args

    run = make_run(parse_args(flags()), rank=rank, world_size=world_size)
    operations: CommLog = run.parallel.comm_log
    pending = start_all_reduce(torch.ones(3), run.parallel.dp)
    before = operations.waiting is None
    seen: list[CommOp | None] = []
    (work,) = pending.works

    class Watched:
        def wait(self) -> None:
            seen.append(operations.waiting)
            work.wait()

    replace(pending, works=[Watched()]).wait()  # type: ignore[list-item]
    return str(operations.last), str(seen[0]), before and operations.waiting is None


def test_an_axis_logs_what_it_starts_and_waits_for() -> None:
    expected = ("all_reduce 1 of [3] over dp", "all_reduce 1 of [3] over dp", True)
    assert set(run_ranks(2, noted, 2)) == {expected}
