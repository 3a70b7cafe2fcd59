"""Saves on ranks forked from a process in which `crash_shim.c`, loaded before the C library, disturbs one of them.

Reads one case per line and prints its ranks' exit codes. So torch is imported once for all cases.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path

from megatron.checkpoint.run_state import Retention
from megatron.checkpoint.save import Save
from megatron.utils import durable
from tests.faults.support import exit_codes, save_of_ranks


class Way(IntEnum):
    """Action of the shim at an operation."""

    WATCH = 0  # nothing
    KILL = 1  # its process is killed instead
    HALF = 2  # half of a write is done, then its process is killed
    FULL = 3  # ENOSPC
    BROKEN = 4  # EIO


@dataclass(frozen=True)
class Case:
    directory: str
    """Directory of the save; each rank's operations are written beside it."""
    ranks: int
    background: bool
    rank: int = 0
    operation: int = 0
    way: int = Way.WATCH
    bug: str = ""
    """Name of a planted bug, one of BUGS."""

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    def log(self, rank: int) -> Path:
        return Path(f"{self.directory}.rank-{rank}")


def named_before_it_is_written() -> None:
    rename = durable.rename
    durable.rename = lambda source, target: None if source == target else rename(source, target)
    Save._temporary = Save._target  # type: ignore[method-assign]


def nothing_is_synced() -> None:
    os.fsync = lambda descriptor: None  # type: ignore[assignment]


BUGS = {function.__name__: function for function in (named_before_it_is_written, nothing_is_synced)}


@contextmanager
def watched(case: Case, rank: int) -> Iterator[None]:
    shim = ctypes.CDLL(None)  # preloaded, so that its names are those of the process
    operation, way = (case.operation, case.way) if rank == case.rank else (0, Way.WATCH)
    with case.log(rank).open("wb") as log:
        shim.crash_begin(os.fsencode(case.directory), log.fileno(), ctypes.c_long(operation), int(way))
        try:
            yield
        finally:
            shim.crash_end()


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep the ranks' output out of the answers
    for line in sys.stdin:
        case = Case(**json.loads(line))

        def body(rank: int, case: Case = case) -> None:
            if case.bug:
                BUGS[case.bug]()
            directory, kept = Path(case.directory), Retention(2, None)
            save_of_ranks(rank, case.ranks, directory, watched(case, rank), background=case.background, kept=kept)

        print(json.dumps(exit_codes(case.ranks, body)), file=answers, flush=True)


if __name__ == "__main__":
    serve()
