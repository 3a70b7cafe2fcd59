"""Configures a rank's CPU threads: their number, cores and scheduling policy."""

import os
from contextlib import suppress
from pathlib import Path

import torch

from megatron.distributed.launch import LaunchInfo
from megatron.errors import ConfigError

_CPUS = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_TASKS = Path("/proc/self/task")

Core = frozenset[int]
"""Logical CPUs of one physical core; two with hyper-threading."""


def usable_cores(cpus: Path = _CPUS) -> list[Core]:
    """Physical cores that this process may run on, in order."""
    if not hasattr(os, "sched_getaffinity"):
        return [frozenset({number}) for number in range(os.cpu_count() or 1)]
    allowed = os.sched_getaffinity(0)
    cores = {_siblings(cpus, number) & allowed or frozenset({number}) for number in allowed}
    return sorted(cores, key=min)


def _siblings(cpus: Path, number: int) -> Core:
    """Logical CPUs of the same core, from a list such as "0-1" or "0,64"."""
    try:
        text = (cpus / f"cpu{number}/topology/thread_siblings_list").read_text()
        ranges = [part.split("-") for part in text.strip().split(",")]
        return frozenset(n for bounds in ranges for n in range(int(bounds[0]), int(bounds[-1]) + 1))
    except (OSError, ValueError):  # the system does not list them
        return frozenset({number})


def quota_cores(cores: int, quota_file: Path = _QUOTA) -> int:
    """Limits `cores` to the CPU quota of the container (cgroup v2)."""
    try:
        quota, period = quota_file.read_text().split()
        return cores if quota == "max" else min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2
        return cores


def threads_per_process(info: LaunchInfo, setting: int | None = None, cores: int | None = None) -> int:
    """CPU threads of this process: the setting, else the machine's usable cores divided by its ranks."""
    if setting is not None:
        return setting
    return max(1, (quota_cores(len(usable_cores())) if cores is None else cores) // info.local_world_size)


def set_threads(info: LaunchInfo, setting: int | None = None) -> int:
    """Sets torch's thread count, which affects the last bits of results, regardless of the launcher's
    OMP_NUM_THREADS."""
    threads = threads_per_process(info, setting)
    torch.set_num_threads(threads)
    return threads


def pin(info: LaunchInfo, cores: list[Core] | None = None) -> Core:
    """Pins this process, and the threads that it will start, to its share of the machine's cores."""
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("--cpu-pinning: this system does not let a process choose its cores; remove it")
    cores = usable_cores() if cores is None else cores
    share = len(cores) // info.local_world_size
    if share == 0:
        raise ConfigError(
            f"--cpu-pinning: {info.local_world_size} ranks need a core each, but {len(cores)} are usable; remove it"
        )
    mine: Core = frozenset().union(*cores[info.local_rank * share : (info.local_rank + 1) * share])
    for thread in _threads():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(thread, mine)
    return mine


def set_scheduling(choice: str, info: LaunchInfo) -> str:
    """Sets the scheduling policy of this process's threads; returns a line for the log.

    With `batch` (SCHED_BATCH) a thread that wakes up does not preempt a running one. With the ordinary policy, when two
    ranks of one machine communicate, the receiving thread preempts the sender at the first bytes of a message, and
    again at the next ones.
    """
    if hasattr(os, "sched_getscheduler") and os.sched_getscheduler(0) != os.SCHED_OTHER:
        return "CPU scheduling: as set when this process was started; --cpu-scheduling has no effect"
    if choice == "ordinary" or (choice == "auto" and info.local_world_size == 1):
        return "CPU scheduling: ordinary"
    if not hasattr(os, "SCHED_BATCH"):
        return _ordinary(choice, "this system has no batch scheduling")
    try:
        for thread in _threads():
            with suppress(ProcessLookupError):
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
    except OSError as error:
        return _ordinary(choice, f"the system rejects batch scheduling ({error.strerror})")
    return "CPU scheduling: batch, for messages between ranks of one machine (--cpu-scheduling ordinary is slower)"


def _ordinary(choice: str, reason: str) -> str:
    if choice == "batch":
        raise ConfigError(f"--cpu-scheduling batch: {reason}; use auto or ordinary")
    return f"CPU scheduling: ordinary; {reason}"


def _threads() -> list[int]:
    """Threads of this process. Each must be set: a thread inherits only from the one that started it."""
    return [int(task.name) for task in _TASKS.iterdir()] if _TASKS.is_dir() else [0]
