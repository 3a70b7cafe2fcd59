"""Threads, pinning and scheduling policy of the ranks of one machine."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from megatron.distributed import cores
from megatron.distributed.launch import LaunchInfo
from megatron.errors import ConfigError
from tests.helpers.warm import warm_python


def info_of(local_world_size: int, local_rank: int = 0) -> LaunchInfo:
    return LaunchInfo(world_size=local_world_size, local_world_size=local_world_size, local_rank=local_rank)


def test_threads_are_shared_by_the_ranks_of_a_machine() -> None:
    assert [cores.threads_per_process(info_of(n), cores=8) for n in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]
    assert cores.threads_per_process(info_of(4), setting=3, cores=8) == 3


def test_the_same_setting_gives_the_same_threads() -> None:
    before = torch.get_num_threads()
    try:
        for ranks in (1, 2):
            assert cores.set_threads(info_of(ranks), setting=2) == 2
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_containers_quota_counts(tmp_path: Path) -> None:
    told = tmp_path / "cpu.max"
    for text, expected in (("200000 100000", 2), ("50000 100000", 1), ("max 100000", 64), ("nonsense", 64)):
        told.write_text(text)
        assert cores.quota_cores(64, told) == expected
    assert cores.quota_cores(64, tmp_path / "none") == 64


@pytest.mark.parametrize(
    ("siblings", "allowed", "expected"),
    [
        (["0,2", "1,3", "0,2", "1,3"], {0, 1, 2, 3}, [{0, 2}, {1, 3}]),
        (["0-1", "0-1", "2-3", "2-3"], {0, 1, 2}, [{0, 1}, {2}]),
        (["0", "1"], {1}, [{1}]),
        ([], {0, 5}, [{0}, {5}]),  # a system that does not tell
    ],
)
def test_two_threads_of_one_core_are_one_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, siblings: list[str], allowed: set[int], expected: list[set[int]]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed, raising=False)
    for number, text in enumerate(siblings):
        folder = tmp_path / f"cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text + "\n")
    assert cores.usable_cores(tmp_path) == expected


def test_ranks_are_pinned_to_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: asked.append(set(cpus)), raising=False)
    machine = [frozenset({n, n + 5}) for n in range(5)]
    shares = [cores.pin(info_of(2, rank), machine) for rank in range(2)]
    assert shares == [{0, 5, 1, 6}, {2, 7, 3, 8}]
    assert asked and all(cpus in shares for cpus in asked)


def test_more_ranks_than_cores_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--cpu-pinning: 3 ranks need a core each, but 2 are usable"):
        cores.pin(info_of(3), [frozenset({0}), frozenset({1})])
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(ConfigError, match="--cpu-pinning: this system does not let"):
        cores.pin(info_of(1))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_threads_that_are_there_already_are_pinned_too() -> None:
    program = """
import os, threading, time
from megatron.distributed.cores import pin, usable_cores
from megatron.distributed.launch import LaunchInfo
stop = threading.Event()
threading.Thread(target=stop.wait, daemon=True).start()
mine = pin(LaunchInfo(), usable_cores()[:1])
print(all(os.sched_getaffinity(int(task)) == mine for task in os.listdir("/proc/self/task")))
stop.set()
"""
    found = subprocess.run([warm_python(), "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "True"


def policies_are_allowed() -> bool:
    """Some containers forbid what Linux allows everybody. Tries it in a new thread, the only one that it changes."""
    failed: list[OSError] = []

    def try_both() -> None:
        try:
            for policy in (os.SCHED_BATCH, os.SCHED_IDLE):
                os.sched_setscheduler(0, policy, os.sched_param(0))
        except OSError as error:
            failed.append(error)

    if not hasattr(os, "SCHED_BATCH"):
        return False
    thread = threading.Thread(target=try_both)
    thread.start()
    thread.join()
    return not failed


def policies(choice: str, ranks: int, *, before: str = "") -> tuple[str, set[str]]:
    """The log line, and the policies of all threads of a process that already had a second thread."""
    program = f"""
import os, threading
from megatron.distributed.cores import set_scheduling
from megatron.distributed.launch import LaunchInfo
{before}
stop = threading.Event()
threading.Thread(target=stop.wait, daemon=True).start()
print(set_scheduling({choice!r}, LaunchInfo(world_size={ranks}, local_world_size={ranks})))
names = {{os.SCHED_OTHER: "ordinary", os.SCHED_BATCH: "batch", os.SCHED_IDLE: "idle"}}
print(*[names[os.sched_getscheduler(int(task))] for task in os.listdir("/proc/self/task")])
stop.set()
"""
    found = subprocess.run([warm_python(), "-c", program], capture_output=True, text=True, check=True)
    said, names = found.stdout.splitlines()
    return said, set(names.split())


@pytest.mark.skipif(not policies_are_allowed(), reason="this system lets nobody choose how it schedules")
@pytest.mark.parametrize(
    ("choice", "ranks", "expected"),
    [("auto", 2, "batch"), ("auto", 1, "ordinary"), ("batch", 1, "batch"), ("ordinary", 2, "ordinary")],
)
def test_ranks_that_talk_on_one_machine_do_not_interrupt_themselves(choice: str, ranks: int, expected: str) -> None:
    said, found = policies(choice, ranks)
    assert found == {expected} and said.startswith(f"CPU scheduling: {expected}")


@pytest.mark.skipif(not policies_are_allowed(), reason="this system lets nobody choose how it schedules")
@pytest.mark.parametrize("choice", ["auto", "batch", "ordinary"])
def test_a_policy_that_the_user_chose_stays(choice: str) -> None:
    said, found = policies(choice, 2, before="os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))")
    assert found == {"idle"} and said.startswith("CPU scheduling: as set when this process was started")


def test_a_system_without_batch_scheduling(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "SCHED_BATCH", 3, raising=False)
    monkeypatch.setattr(os, "SCHED_OTHER", 0, raising=False)
    monkeypatch.setattr(os, "sched_getscheduler", lambda pid: 0, raising=False)
    monkeypatch.setattr(os, "sched_setscheduler", refuse, raising=False)
    assert cores.set_scheduling("auto", info_of(2)) == (
        "CPU scheduling: ordinary; the system rejects batch scheduling (Operation not permitted)"
    )
    monkeypatch.delattr(os, "SCHED_BATCH")
    with pytest.raises(ConfigError, match="--cpu-scheduling batch: this system has no batch scheduling"):
        cores.set_scheduling("batch", info_of(2))
