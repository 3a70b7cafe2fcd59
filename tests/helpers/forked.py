"""The ranks of a script as a launcher starts them (their place in the environment, an exit code, what they print), but
forked from this process: what `tests.helpers.runs.launch` gives, without two seconds of imports for every rank and for
torchrun. For tests that are not about launchers."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.helpers.checkout import free_port
from tests.helpers.distributed import import_for_ranks, on_own_cores
from tests.helpers.runs import REPOSITORY


def launch_forked(
    argv: Sequence[str], *, ranks: int = 1, script: Path = REPOSITORY / "pretrain_gpt.py", timeout: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """The code is that of the first rank that failed, the output that of all, one rank after the other."""
    import_for_ranks()
    port, context = free_port(), multiprocessing.get_context("fork")
    with TemporaryDirectory() as folder, on_own_cores():
        places = [Path(folder) / str(rank) for rank in range(ranks)]
        processes: list[BaseProcess] = [
            context.Process(target=_run, args=(rank, ranks, port, script, argv, place))
            for rank, place in enumerate(places)
        ]
        for process in processes:
            process.start()
        codes = _codes(processes, timeout)
        out, err = ("".join(place.with_suffix(kind).read_text() for place in places) for kind in (".out", ".err"))
    return subprocess.CompletedProcess([str(script), *argv], next(filter(None, codes), 0), out, err)


def _codes(processes: Sequence[BaseProcess], timeout: float) -> list[int]:
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    assert not late, f"ranks {late} did not end within {timeout:.0f} s"
    return [process.exitcode or 0 for process in processes]


def _run(rank: int, ranks: int, port: int, script: Path, argv: Sequence[str], place: Path) -> None:
    sys.stdout, sys.stderr = place.with_suffix(".out").open("w"), place.with_suffix(".err").open("w")
    torch.set_num_threads(1)  # a forked child must not enter the parent's OpenMP team: it would wait for ever
    if ranks > 1:
        where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        where |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in where.items()})
    sys.argv = [str(script), *argv]
    runpy.run_path(str(script), run_name="__main__")
