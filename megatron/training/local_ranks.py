"""Starts ranks of its own on this machine, for a tool that compares layouts: gloo on the CPU, no port, no launcher.

The ranks are forked and meet through a file. Each leaves what it found in the folder; the first that fails ends all.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.errors import ConfigError, MegatronError, PeerLostError
from megatron.training.process import named

_GRACE = 2.0
"""Seconds after the first failure, in which the rank whose failure was the cause is heard too."""


class RankError(MegatronError):
    """What a rank ended with."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def run_ranks(count: int, body: Callable[[int], None], folder: Path, timeout: timedelta) -> None:
    """`body(rank)` in `count` processes that have a default group; returns when all have ended well."""
    if not hasattr(os, "fork"):
        raise ConfigError("this system cannot fork processes; use Linux, or WSL")
    folder.mkdir()
    context = multiprocessing.get_context("fork")
    processes: list[BaseProcess] = []
    try:
        for rank in range(count):
            process: BaseProcess = context.Process(target=_rank, args=(rank, count, body, folder, timeout), daemon=True)
            process.start()
            processes.append(process)
        _wait(processes, folder, timeout)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()  # a stopped process hears nothing less
            process.join()


def _wait(processes: list[BaseProcess], folder: Path, timeout: timedelta) -> None:
    running = dict(enumerate(processes))
    deadline = time.monotonic() + timeout.total_seconds()
    failed: dict[int, int] = {}
    while running and (left := deadline - time.monotonic()) > 0:
        wait([process.sentinel for process in running.values()], timeout=left)
        for rank, process in list(running.items()):
            if process.exitcode is not None:
                del running[rank]
                if process.exitcode:
                    failed[rank] = process.exitcode
        if failed:
            deadline = min(deadline, time.monotonic() + _GRACE)
    if failed:
        raise _cause(failed, folder)
    if running:
        raise PeerLostError(
            f"rank{'s' if len(running) > 1 else ''} {', '.join(map(str, running))} did not end within "
            f"{timeout.total_seconds():.0f} s: the ranks wait for each other, or the machine is too slow; "
            "raise --timeout-minutes, or lower --steps"
        )


def _cause(failed: dict[int, int], folder: Path) -> MegatronError:
    """A rank that was killed, else one with an error of its own, else one that lost its peers."""
    errors = []
    for rank, code in failed.items():
        if code < 0:
            return PeerLostError(
                f"rank {rank} was killed ({signal.Signals(-code).name}); if it was for memory, leave --full out or "
                "lower --ranks"
            )
        told = json.loads((folder / f"error_{rank}.json").read_text())
        errors.append((told["exit_code"] == PeerLostError.exit_code, rank, told))
    _, rank, told = min(errors, key=lambda error: error[:2])
    return RankError(f"rank {rank}: {told['text']}", told["exit_code"])


def _rank(rank: int, count: int, body: Callable[[int], None], folder: Path, timeout: timedelta) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its ranks
    torch.set_num_threads(1)  # a forked child must not enter the parent's OpenMP team: it would wait for ever
    try:
        if count > 1:
            store = dist.FileStore(str(folder / "meeting"), count)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timeout)
        body(rank)
        if count > 1:
            dist.barrier()
            dist.destroy_process_group()
    except Exception as error:
        told = named(error)
        known = isinstance(told, MegatronError)
        text = str(told) if known else traceback.format_exc()
        code = told.exit_code if isinstance(told, MegatronError) else 1
        (folder / f"error_{rank}.json").write_text(json.dumps({"text": text, "exit_code": code}))
        sys.stdout.flush()
        os._exit(code)  # a group that is left alone would wait for the others
