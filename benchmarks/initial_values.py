"""Compares the speed of drawing initial values: ours and numpy's (any slice) and torch's (the whole).

    python benchmarks/initial_values.py            # one thread, then all; about 20 s

Times are CPU time on one thread and wall clock on all. Contenders take turns, and a ratio compares times of one round.
Memory is allocated as in a run of pretrain_gpt.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.model.random_values import Run, normal_values
from megatron.utils.cpu import set_allocator
from megatron.utils.process import usable_cpus

ROWS, COLUMNS, RANKS = 4096, 4096, 8


def slices(split: str) -> list[Run]:
    """Slices of the first of eight ranks."""
    if split == "rows":
        return [(0, ROWS // RANKS * COLUMNS)]
    return [(row * COLUMNS, COLUMNS // RANKS) for row in range(ROWS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print(set_allocator("auto"))
    whole = ROWS * COLUMNS
    contenders: dict[str, tuple[Callable[[], object], int]] = {
        "torch, whole": (lambda: torch.empty(whole).normal_(), whole),
        "ours, whole": (lambda: normal_values(1, "w", [(0, whole)], 0.02), whole),
        "numpy, whole": (lambda: normal_values(1, "w", [(0, whole)], 0.02, in_numpy=True), whole),
        "ours, 1/8 of the rows": (lambda: normal_values(1, "w", slices("rows"), 0.02), whole // RANKS),
        "ours, 1/8 of the columns": (lambda: normal_values(1, "w", slices("columns"), 0.02), whole // RANKS),
    }
    for threads, clock in ((1, time.process_time), (usable_cpus(), time.perf_counter)):
        torch.set_num_threads(threads)
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds + 1):  # the first touches the memory
            for name, (draw, _) in contenders.items():
                started = clock()
                draw()
                seconds[name].append(clock() - started)
        for name, (_, count) in contenders.items():
            mine, each = seconds[name][1:], statistics.median(seconds[name][1:]) / count * 1e9
            ratios = [
                statistics.median(a / b for a, b in zip(mine, seconds[other][1:], strict=True))
                for other in ("torch, whole", "numpy, whole")
            ]
            print(
                f"{threads} threads  {name:<24} {each:6.2f} ns per value; {ratios[0]:.2f} x the time of torch, whole; "
                f"{ratios[1]:.2f} x numpy, whole"
            )


if __name__ == "__main__":
    main()
