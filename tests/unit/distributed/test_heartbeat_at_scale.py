"""Heartbeats of thousands of ranks over a store that counts its requests. A rank's requests do not grow with the number
of ranks, long waits end no healthy run, and faults are found."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from megatron.distributed.comm_log import CommLog
from megatron.errors import HangError, MegatronError, PeerLostError
from tests.unit.distributed.cluster import LIMIT, PATIENCE, Cluster

REQUEST = 27.8e-6  # seconds of the store for one request, measured


@pytest.mark.parametrize(("world", "seconds"), [(64, 120.0), (8192, 40.0)])
def test_a_long_wait_costs_the_store_little_and_ends_no_healthy_run(world: int, seconds: float) -> None:
    """One rank saves a checkpoint for a minute while all others wait. Above 20 s, each of them used to read all
    statuses every second."""
    cluster = Cluster(world)
    cluster.wait([rank for rank in range(world) if rank != 5])
    cluster.store.keys = 0
    for requests in cluster.pass_time(seconds):
        # A rank: its status, the announcement, two others (2), and now and then a question or its last operations.
        assert requests <= 6 * world + 5
        assert requests * REQUEST / cluster.interval < 0.2, "of the store's time"
        keys, cluster.store.keys = cluster.store.keys, 0
        assert keys <= 10 * world + 3 * world, "the look at all, by one rank"
    assert not cluster.ended
    assert cluster.board.seen.keys() == set(range(world)), "the rank in charge has looked at all"


def run_until_the_end(cluster: Cluster, seconds: float) -> tuple[MegatronError, list[int]]:
    for _ in cluster.pass_time(seconds):
        pass
    assert len({str(error) for _, error, _ in cluster.ended}) == 1
    assert len(cluster.ended) == len({number for number, _, _ in cluster.ended})
    return cluster.ended[0][1], [number for number, _, prints in cluster.ended if prints]


@pytest.mark.parametrize("world", [4, 256])
def test_a_collective_left_out_is_found_by_the_one_in_charge(world: int) -> None:
    cluster = Cluster(world)
    cluster.wait([rank for rank in range(world) if rank != 3])
    cluster.wait([3], axis="tp")
    error, printed = run_until_the_end(cluster, 60.0)
    assert isinstance(error, HangError) and "which rank 3 has not begun" in str(error)
    assert printed == [0] and len(cluster.ended) == world


def test_a_rank_that_is_silent_is_named_by_the_one_before_it_and_replaced_if_it_was_in_charge() -> None:
    cluster = Cluster(64)
    cluster.beating -= {0}
    cluster.ranks[0]._host = "gone"
    error, printed = run_until_the_end(cluster, 60.0)
    assert (
        isinstance(error, PeerLostError) and "rank 0 (process" in str(error) and "has sent no heartbeat" in str(error)
    )
    assert len(printed) == 1 and len(cluster.ended) == 63


def test_another_rank_takes_charge_when_the_first_has_finished() -> None:
    cluster = Cluster(16)
    for rank in (0, 1):
        cluster.ranks[rank].leave()
        cluster.beating.discard(rank)
    cluster.wait(range(2, 16))
    cluster.wait([9], axis="tp")
    error, printed = run_until_the_end(cluster, 80.0)
    assert isinstance(error, HangError) and printed == [2]


def test_a_rank_that_is_stuck_is_named_when_the_others_time_is_up() -> None:
    cluster = Cluster(16)
    cluster.wait([rank for rank in range(16) if rank != 11])
    for _ in cluster.pass_time(100.0):
        pass
    assert not cluster.ended, "it may be slow"
    for rank in (3, 4):  # the others only see that these have gone
        cluster.logs[rank].timed_out, cluster.logs[rank].waiting = cluster.logs[rank].waiting, None
        cluster.ranks[rank]._board.ask()
    error, _ = run_until_the_end(cluster, 10.0)
    assert isinstance(error, HangError) and error.exit_code == 16
    assert str(error).startswith("rank 11 (process ") and "is alive and stuck" in str(error)
    assert "rank 3 has waited for it until the timeout in all_reduce 9" in str(error) and len(cluster.ended) == 16


def test_a_hang_on_the_devices_is_found_where_the_hosts_wait_for_an_outcome() -> None:
    """NCCL's waits return at once, so all hosts read the outcome of their step; one rank began one collective less."""
    for left_out in ((), (6,)):
        cluster = Cluster(16)
        for rank, log in enumerate(cluster.logs):
            for _ in range(3 if rank in left_out else 4):
                log.began("all_reduce", "dp", range(16), (4,))
        with ExitStack() as waits:
            for log in cluster.logs:
                waits.enter_context(log.read_back("reading the outcome of step 7"))
                log.moved = 0.0
            for _ in cluster.pass_time(60.0):
                pass
        assert len(cluster.ended) == (16 if left_out else 0), "a step of a minute is no hang"
    text = str(cluster.ended[0][1])
    assert "rank 6 has begun 3 collectives over dp" in text and "rank 0 4 (" in text


def test_a_rank_that_is_stuck_is_named_where_the_others_wait_for_their_devices() -> None:
    """NCCL's waits do not time out, and torch's watchdog would abort the ranks without a name."""
    cluster = Cluster(16)
    with ExitStack() as waits:
        for rank, log in enumerate(cluster.logs):
            for _ in range(3 if rank == 6 else 4):
                log.began("all_reduce", "dp", range(16), (4,))
            if rank != 6:
                waits.enter_context(log.read_back("reading the outcome of step 7"))
            log.moved = 0.0
        for _ in cluster.pass_time(LIMIT):
            pass
        assert not cluster.ended, "it may be slow"
        error, _ = run_until_the_end(cluster, 2 * PATIENCE)
    assert isinstance(error, HangError) and error.exit_code == 16 and len(cluster.ended) == 16
    assert str(error).startswith("rank 6 (process ") and "is alive and stuck" in str(error)
    assert "until the timeout in all_reduce 4" in str(error)


def test_a_wait_that_ends_by_its_timeout_is_noted() -> None:
    log: Any = CommLog()
    operation = log.began("all_reduce", "dp", (0, 1), None)
    for text, noted in (("Connection closed by peer", None), ("Timed out waiting 9ms for recv", operation)):
        with pytest.raises(RuntimeError), log.wait(operation):
            raise RuntimeError(f"[gloo/transport/tcp/unbound_buffer.cc:81] {text}")
        assert log.timed_out is noted and log.waiting is None
