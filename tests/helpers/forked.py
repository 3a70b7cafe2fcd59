"""Starts the ranks of a script like a launcher (environment, exit codes, output), but forks them from this process: as
`tests.helpers.runs.launch`, without torchrun and without importing this project in every rank. Serves tests that are
not about launchers, and those that need a rank's process id."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.helpers.checkout import free_port
from tests.helpers.distributed import import_for_ranks, on_own_cores
from tests.helpers.runs import REPOSITORY


@dataclass(frozen=True)
class Forked:
    """A rank with the methods of `subprocess.Popen` that tests use."""

    process: BaseProcess

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"process {self.pid} did not end in time"
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()


def launch_forked(
    argv: Sequence[str], *, ranks: int = 1, script: Path = REPOSITORY / "pretrain_gpt.py", timeout: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Returns the code of the first rank that failed, and the output of all, rank by rank."""
    deadline = time.monotonic() + timeout
    with TemporaryDirectory() as folder:
        places = [Path(folder) / str(rank) for rank in range(ranks)]
        processes = start_forked(argv, script, places)
        try:
            codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        out, err = ("".join(place.with_suffix(kind).read_text() for place in places) for kind in (".out", ".err"))
    return subprocess.CompletedProcess([str(script), *argv], next(filter(None, codes), 0), out, err)


def start_forked(argv: Sequence[str], script: Path, places: Sequence[Path]) -> list[Forked]:
    """Starts a rank for each place, which writes PLACE.out and PLACE.err."""
    import_for_ranks()
    port, context = free_port(), multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_run, args=(rank, len(places), port, script, argv, place))
        for rank, place in enumerate(places)
    ]
    with on_own_cores():
        for process in processes:
            process.start()
    return [Forked(process) for process in processes]


def _run(rank: int, ranks: int, port: int, script: Path, argv: Sequence[str], place: Path) -> None:
    faulthandler.disable()  # pytest's, which would write into the log of the tests
    sys.stdout, sys.stderr = place.with_suffix(".out").open("w"), place.with_suffix(".err").open("w")
    os.dup2(sys.stdout.fileno(), 1)  # where C++ writes
    os.dup2(sys.stderr.fileno(), 2)
    torch.set_num_threads(1)  # a forked child must not enter the parent's OpenMP team: it would wait for ever
    if ranks > 1:
        where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        where |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in where.items()})
    sys.argv = [str(script), *argv]
    runpy.run_path(str(script), run_name="__main__")
