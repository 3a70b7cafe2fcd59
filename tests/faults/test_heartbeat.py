"""A rank is killed, stopped or skips a collective: the others end in time and report which rank, when and where.

The ranks are real processes, started without a launcher's agent, each with its own exit code.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.checkout import free_port
from tests.helpers.forked import launch_forked, start_forked
from tests.helpers.runs import REPOSITORY, flags, launch

BOUND = 60.0  # seconds for ranks that end within 30 on a quiet machine: 20 until it is noticed, and a few to tell

SCRIPT = f"""
import os, signal, sys, time
sys.path.insert(0, {str(REPOSITORY)!r})
import pretrain_gpt
import torch
from megatron.pretrain import pretrain
from megatron.distributed import collectives

how, whom = sys.argv.pop(1), sys.argv.pop(1)
calls = iter(range(10**9))

def forward_step(model, batch):
    loss, count = pretrain_gpt.forward_step(model, batch)
    if next(calls) == 6 and os.environ.get("RANK") == whom:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "slow":
            assert world.comm_log.watched  # so that a wait for a rank that saves has no limit
            time.sleep(6.0)
            print("was slow", file=sys.stderr, flush=True)
        if how == "stuck":
            time.sleep(1000.0)
        if how == "error":
            raise ValueError("planted")
        if how == "skip":
            original = collectives.start_all_reduce
            def skipped(tensor, axis, *rest):
                collectives.start_all_reduce = original
                return None
            collectives.start_all_reduce = skipped
        if how in ("lies", "announces"):  # through a connection of its own, as any program that reaches the port
            lie(how)
        if how == "elsewhere":  # in another collective than the others
            collectives.barrier(world)
    return loss, count

def lie(how):
    from datetime import timedelta
    port = int(os.environ["MASTER_PORT"])
    store = torch.distributed.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=9), wait_for_workers=False)
    store = torch.distributed.PrefixStore("heartbeat/none/attempt_0", store)
    if how == "announces":
        store.set("announced", "2 lost rank 1 \\x1b[31m has ended")
        return
    for rank in range(3):
        for key in ("rank_", "recent_"):
            store.set(f"{{key}}{{rank}}", ("[" * 100000, b"\\xff\\x00", '{{"rank": "1"}}')[rank])
    store.set("asked", b"\\xff")
    time.sleep(3.0)  # they beat again
    store.set("rank_1", "[" * 100000)
    os.kill(os.getpid(), signal.SIGSTOP)

def model_provider(run):
    global world
    world = run.parallel.world
    return pretrain_gpt.model_provider(run)

if how in ("kill connecting", "no connection") and os.environ.get("RANK") == whom:
    def connecting(*given, **named):
        if how == "kill connecting":  # once the others are watching, who learn of rank 0 from the store that it keeps
            watch = torch.distributed.PrefixStore("start/none/attempt_0", named["store"].underlying_store)
            watch.wait(["rank_0", "rank_1", "rank_2"])
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("gloo: Connect timeout [planted]")
    torch.distributed.init_process_group = connecting

pretrain(pretrain_gpt.datasets_provider, model_provider, forward_step)
"""


class Ranks:
    """Processes started without a launcher's agent. `fresh`: new interpreters instead of forks."""

    def __init__(self, folder: Path, count: int, how: str, whom: int, argv: list[str], *, fresh: bool = False) -> None:
        script = folder / "pretrain_faulty.py"
        script.write_text(SCRIPT)
        places = [folder / f"rank_{rank}" for rank in range(count)]
        self.errors = [place.with_suffix(".err") for place in places]
        self.processes = (start_fresh if fresh else start_forked)([how, str(whom), *argv], script, places)

    def codes(self, besides: int | None = None) -> list[int]:
        deadline = time.monotonic() + 2 * BOUND
        return [
            process.wait(max(0.1, deadline - time.monotonic()))
            for rank, process in enumerate(self.processes)
            if rank != besides
        ]

    def said(self) -> list[str]:
        return [line for path in self.errors for line in path.read_text().splitlines() if line.startswith("error")]

    def frames(self) -> list[str]:
        """Lines around the messages: torch's C++ stack frames and tracebacks."""
        lines = [line for path in self.errors for line in path.read_text().splitlines()]
        return [line for line in lines if line.startswith(("frame #", "Exception raised from", "Traceback"))]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def start_fresh(argv: list[str], script: Path, places: list[Path]) -> list[subprocess.Popen[bytes]]:
    port, processes = free_port(), []
    for rank, place in enumerate(places):
        where = {"RANK": rank, "WORLD_SIZE": len(places), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(script), *argv],
                env={**os.environ, **{key: str(value) for key, value in where.items()}},
                stdout=subprocess.DEVNULL,
                stderr=place.with_suffix(".err").open("w"),
            )
        )
    return processes


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Ranks]]:
    running: list[Ranks] = []
    yield running
    for ranks in running:
        ranks.end()


def arguments(tmp_path: Path, patience: int = 3, **more: object) -> list[str]:
    return flags(
        train_iters=500, save=tmp_path / "ckpt", save_interval=1000, heartbeat_timeout_seconds=patience, **more
    )


@pytest.mark.parametrize("whom", [0, 1])
@pytest.mark.parametrize(
    ("how", "words"), [("kill", "ended without an error message"), ("stop", "is stopped (SIGSTOP, or a debugger)")]
)
def test_a_lost_rank_is_named(how: str, words: str, whom: int, tmp_path: Path, started: list[Ranks]) -> None:
    """Rank 0 keeps the store through which the ranks talk. Some ranks load torch themselves: what torch's C++ code
    prints is decided when it is loaded."""
    ranks = Ranks(tmp_path, 3, how, whom, arguments(tmp_path, global_batch_size=12), fresh=how == "kill")
    started.append(ranks)
    assert ranks.codes(besides=whom) == [17, 17]
    said = ranks.said()
    assert said, "nobody said anything"
    for line in said:
        assert f": rank {whom} (process {ranks.processes[whom].pid} on " in line and words in line, said
        assert "last seen in step " in line and " is at step 4, " in line and "all_reduce" in line, said
        assert line.endswith("4 iterations are lost; give a --save-interval below 1000 to save more often"), said
    if whom != 0:
        assert len(said) == 1, said
    assert ranks.frames() == []
    record = json.loads((tmp_path / "ckpt" / "exit_reason.json").read_text())
    assert (record["reason"], record["exit_code"]) == ("PeerLostError", 17) and f"rank {whom} " in record["text"]


@pytest.mark.parametrize("whom", [0, 1])
@pytest.mark.parametrize(
    ("how", "words"),
    [("no connection", "Connect timeout [planted]"), ("kill connecting", "ended without an error message")],
)
def test_ranks_do_not_wait_for_one_that_cannot_connect(
    how: str, words: str, whom: int, tmp_path: Path, started: list[Ranks]
) -> None:
    """gloo retries for several times --distributed-timeout-minutes, 10 minutes each."""
    ranks = Ranks(tmp_path, 3, how, whom, arguments(tmp_path, global_batch_size=12))
    started.append(ranks)
    assert ranks.codes(besides=whom) == [17, 17]
    said = "\n".join(ranks.said())
    assert f"rank {whom}" in said and words in said, said


def test_a_rank_in_another_collective_is_named(tmp_path: Path, started: list[Ranks]) -> None:
    argv = arguments(tmp_path, tensor_model_parallel_size=2)
    ranks = Ranks(tmp_path, 4, "elsewhere", 1, argv)
    started.append(ranks)
    assert set(ranks.codes()) == {16}
    (said,) = ranks.said()
    assert "skipped or added a collective" in said and "rank 1" in said and "step 4" in said, said
    assert "all_reduce" in said and "barrier" in said and " over world" in said
    assert json.loads((tmp_path / "ckpt" / "exit_reason.json").read_text())["exit_code"] == 16


def test_a_rank_that_skips_a_collective_does_not_stay_unnoticed(tmp_path: Path, started: list[Ranks]) -> None:
    """gloo aborts a process that receives more than it asked for, so one of the two may print nothing itself."""
    ranks = Ranks(tmp_path, 2, "skip", 1, arguments(tmp_path))
    started.append(ranks)
    codes = ranks.codes()
    assert 0 not in codes and set(codes) <= {16, 17, -6}
    (said,) = ranks.said()
    assert "missing collective" in said and "rank " in said and "step " in said and " over " in said, said


def test_a_rank_that_is_alive_and_stuck_is_named_when_the_time_of_a_collective_is_up(
    tmp_path: Path, started: list[Ranks]
) -> None:
    argv = arguments(tmp_path, global_batch_size=12, distributed_timeout_minutes=0.15)
    ranks = Ranks(tmp_path, 3, "stuck", 1, argv)
    started.append(ranks)
    assert ranks.codes() == [16, 16, 16]
    (said,) = ranks.said()
    assert f": rank 1 (process {ranks.processes[1].pid} on " in said and "is alive and stuck" in said, said
    assert json.loads((tmp_path / "ckpt" / "exit_reason.json").read_text())["exit_code"] == 16


def test_a_slow_rank_that_beats_is_left_alone(tmp_path: Path, started: list[Ranks]) -> None:
    argv = flags(train_iters=4, heartbeat_timeout_seconds=2)
    ranks = Ranks(tmp_path, 2, "slow", 1, argv)
    started.append(ranks)
    assert ranks.codes() == [0, 0] and not ranks.said()
    assert "was slow" in ranks.errors[1].read_text()


@pytest.mark.parametrize("whom", [0, 1])
def test_an_error_of_a_ranks_own_stays_the_cause(whom: int, tmp_path: Path, started: list[Ranks]) -> None:
    ranks = Ranks(tmp_path, 2, "error", whom, arguments(tmp_path))
    started.append(ranks)
    codes = ranks.codes()
    assert codes[whom] == 1 and codes[1 - whom] == 17
    assert "ValueError: planted" in ranks.errors[whom].read_text()
    assert not any("without an error message" in line for line in ranks.said())
    assert json.loads((tmp_path / "ckpt" / "exit_reason.json").read_text())["reason"] == "ValueError"


def test_a_rank_whose_status_another_program_has_overwritten_is_watched_all_the_same(
    tmp_path: Path, started: list[Ranks]
) -> None:
    ranks = Ranks(tmp_path, 3, "lies", 1, arguments(tmp_path, global_batch_size=12))
    started.append(ranks)
    assert ranks.codes(besides=1) == [17, 17]
    (said,) = ranks.said()
    assert f": rank 1 (process {ranks.processes[1].pid} on " in said and "is stopped (SIGSTOP" in said, said
    assert ranks.frames() == []


def test_an_announcement_of_another_program_is_printed_once(tmp_path: Path, started: list[Ranks]) -> None:
    ranks = Ranks(tmp_path, 3, "announces", 1, arguments(tmp_path, global_batch_size=12))
    started.append(ranks)
    assert ranks.codes() == [17, 17, 17]
    (said,) = ranks.said()
    assert '"2 lost rank 1 ?[31m has ended"' in said and "another program writes there" in said, said


@pytest.mark.parametrize("patience", [0, 20])
def test_a_finished_run_is_not_missed(patience: int) -> None:
    done = launch_forked(flags(train_iters=2, heartbeat_timeout_seconds=patience), ranks=2)
    assert done.returncode == 0 and "error" not in done.stderr, done.stderr


@pytest.mark.parametrize("how", ["kill", "skip"])
@pytest.mark.parametrize("whom", [0, 1])
def test_under_torchrun_the_cause_is_said_before_the_launcher_ends_the_others(
    how: str, whom: int, tmp_path: Path
) -> None:
    """The launcher sends SIGTERM within a tenth of a second. If one of two ranks skips a collective, gloo may abort
    either: it aborts a rank that receives what it did not ask for."""
    script = tmp_path / "pretrain_faulty.py"
    script.write_text(SCRIPT)
    argv = arguments(tmp_path, 20, global_batch_size=12)
    started = time.monotonic()
    done = launch([how, str(whom), *argv], ranks=3, script=script, timeout=2 * BOUND)
    assert done.returncode != 0 and time.monotonic() - started < BOUND
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert "ended without an error message" in said and " is at step " in said and "all_reduce" in said, done.stderr
    assert how == "skip" or f": rank {whom} (process " in said, said
    assert not re.search(r"exitcode\W+-15", done.stderr), "nobody went without a look at the others"
    assert json.loads((tmp_path / "ckpt" / "exit_reason.json").read_text())["exit_code"] == 17
