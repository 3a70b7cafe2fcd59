"""Runs a function on several ranks of this machine: forked processes, gloo on the CPU, no port and no launcher.

The ranks meet through a file in a private folder, which no other user can join. Each sends its result to the parent
through a pipe, as bytes that the caller encodes and decodes; nothing is unpickled here.
"""

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.distributed.cores import set_scheduling
from megatron.distributed.launch import LaunchInfo
from megatron.errors import ConfigError, MegatronError, PeerLostError
from megatron.training.exit import as_megatron_error, in_one_line

Body = Callable[[int], bytes]

_GRACE = 2.0
"""Seconds to wait for the cause after a rank reports that it lost another."""
_RESULT, _FAILURE = b"R", b"F"


class RankError(MegatronError):
    """Error that a rank ended with."""

    def __init__(self, rank: int, text: str, exit_code: int, calls: str = "") -> None:
        super().__init__(text)
        self.rank, self.exit_code, self.calls = rank, exit_code, calls

    @property
    def follows_another(self) -> bool:
        """True if this rank only lost its peers."""
        return bool(self.calls) and self.exit_code == PeerLostError.exit_code


@dataclass(frozen=True)
class _Rank:
    process: BaseProcess
    end: Connection  # of the pipe, where its result arrives

    def result(self, rank: int) -> bytes | RankError:
        try:
            message = self.end.recv_bytes()
        except EOFError:
            self.process.join(5)
            return RankError(rank, _death(rank, self.process.exitcode), PeerLostError.exit_code)
        kind, content = message[:1], message[1:]
        return content if kind == _RESULT else RankError(rank, **json.loads(content))


def run_ranks(count: int, body: Body, timeout: timedelta) -> list[bytes]:
    """Runs `body(rank)` in `count` processes, with a process group if there are several; returns results by rank.

    The first rank that fails is reported, and the others are killed.
    """
    if not hasattr(os, "fork"):
        raise ConfigError("this system cannot fork processes; use Linux, or WSL")
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        try:
            for rank in range(count):
                ranks.append(_start(rank, count, body, Path(folder) / "meeting", timeout))
            return _collect(ranks, timeout)
        finally:
            for each in ranks:
                if each.process.is_alive():
                    each.process.kill()  # a stopped process reacts to no other signal
                each.process.join()


def _start(rank: int, count: int, body: Body, meeting: Path, timeout: timedelta) -> _Rank:
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process: BaseProcess = context.Process(target=_run_rank, args=(rank, count, body, meeting, send, timeout))
    process.start()
    send.close()
    return _Rank(process, receive)


def _collect(ranks: list[_Rank], timeout: timedelta) -> list[bytes]:
    results: dict[int, bytes] = {}
    waiting = dict(enumerate(ranks))
    deadline = time.monotonic() + timeout.total_seconds()
    lost_another: RankError | None = None
    while waiting and (ready := wait([each.end for each in waiting.values()], max(0.0, deadline - time.monotonic()))):
        for rank in [rank for rank, each in waiting.items() if each.end in ready]:
            result = waiting.pop(rank).result(rank)
            if isinstance(result, bytes):
                results[rank] = result
            elif result.follows_another:
                lost_another = lost_another or result
                deadline = min(deadline, time.monotonic() + _GRACE)
            else:
                raise result
    if lost_another is not None:
        raise lost_another
    if waiting:
        raise PeerLostError(
            f"rank{'s' if len(waiting) > 1 else ''} {', '.join(map(str, waiting))} did not finish within "
            f"{timeout.total_seconds():.0f} s: the ranks wait for each other, or the machine is too slow; "
            "raise --timeout-minutes, or lower --steps"
        )
    return [results[rank] for rank in range(len(ranks))]


def _death(rank: int, exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return (
            f"rank {rank} was killed ({signal.Signals(-exit_code).name}); if memory ran out, remove --full or "
            "lower --ranks"
        )
    return f"rank {rank} died with exit code {exit_code} and no result"


def _run_rank(rank: int, count: int, body: Body, meeting: Path, send: Connection, timeout: timedelta) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent kills its ranks
    torch.set_num_threads(1)  # a forked child must not enter the parent's OpenMP team: it would hang
    set_scheduling("auto", LaunchInfo(world_size=count, local_world_size=count))
    try:
        if count > 1:
            store = dist.FileStore(str(meeting), count)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timeout)
        result = body(rank)
        if dist.is_initialized():  # unless the body left the group itself
            dist.barrier()
            dist.destroy_process_group()
        send.send_bytes(_RESULT + result)
    except BaseException as error:
        send.send_bytes(_FAILURE + _failure(rank, error))
        sys.stdout.flush()
        os._exit(1)  # leaving the group would wait for the others


def _failure(rank: int, error: BaseException) -> bytes:
    told = as_megatron_error(error)
    text, code = (str(told), told.exit_code) if isinstance(told, MegatronError) else (in_one_line(told), 2)
    return json.dumps({"text": f"rank {rank}: {text}", "exit_code": code, "calls": traceback.format_exc()}).encode()
