"""Runs a function on several gloo ranks of this machine, and cannot pass by running nothing.

    def body(rank: int, size: int) -> float: ...
    results = run_ranks(4, body, 1024)        # body(rank, 1024) on ranks 0 to 3

The ranks are forked, so closures and monkeypatched bugs travel with them, and meet through a file: no port, no
environment. Every rank must return something other than None. The first rank that fails is the one reported; the
others are stopped.
"""

from __future__ import annotations

import importlib
import io
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.distributed.cores import set_scheduling
from megatron.distributed.launch import LaunchInfo

# What torch imports when first needed (recomputation, norms in fp64, profiles): seconds, which every rank of every test
# would spend again. Ranks are forked, so that what is imported once here is there in all of them.
IMPORTED_LATE = ("torch._dynamo", "torch.profiler", "numpy.random")


def import_for_ranks() -> None:
    for name in IMPORTED_LATE:
        importlib.import_module(name)


class RankFailed(AssertionError):
    """A rank raised, died, returned nothing or did not finish in time."""


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Calls `fn(rank, *args)` on every rank with the default group initialised; the results, by rank."""
    import_for_ranks()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes: list[BaseProcess] = []
        ends: list[Connection] = []
        for rank in range(world_size):
            receive, send = context.Pipe(duplex=False)
            meeting = Path(folder) / "rendezvous"
            process = context.Process(target=_rank_main, args=(rank, world_size, meeting, send, timeout, fn, args))
            process.start()
            send.close()
            processes.append(process)
            ends.append(receive)
        try:
            return _collect(processes, ends, time.monotonic() + timeout)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _collect(processes: list[BaseProcess], ends: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(processes):
        waiting = {ends[rank]: rank for rank in range(len(processes)) if rank not in results}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"ranks {sorted(waiting.values())} did not finish in time")
        for end in ready:
            rank = waiting[end]  # type: ignore[index]
            results[rank] = _result(rank, processes[rank], ends[rank])
    return [results[rank] for rank in range(len(processes))]


def _result(rank: int, process: BaseProcess, end: Connection) -> Any:
    try:
        kind, value = pickle.loads(end.recv_bytes())
    except EOFError:
        process.join(5)
        raise RankFailed(f"rank {rank} died with exit code {process.exitcode} and no result") from None
    if kind == "error":
        raise RankFailed(f"rank {rank} failed:\n{value}")
    if value is None:
        raise RankFailed(f"rank {rank} returned None: return what the test compares")
    return value


def _rank_main(
    rank: int,
    world_size: int,
    meeting: Path,
    send: Connection,
    timeout: float,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)  # a forked child must not enter the parent's OpenMP team
    set_scheduling("auto", LaunchInfo(world_size=world_size, local_world_size=world_size))
    try:
        store = dist.FileStore(str(meeting), world_size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
        )
        message = ("result", fn(rank, *args))
        if dist.is_initialized():  # unless the test shut it down itself
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        message = ("error", traceback.format_exc())
    buffer = io.BytesIO()
    try:
        pickle.dump(message, buffer)
    except Exception:
        buffer = io.BytesIO(pickle.dumps(("error", traceback.format_exc())))
    send.send_bytes(buffer.getvalue())
    send.close()
