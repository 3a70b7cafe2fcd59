"""Measures the time until the end of the first iteration, over `import torch` plus that iteration.

    python benchmarks/start_up.py                  # seven rounds, about a minute on an idle machine

Each round starts two new processes, one after the other: a Python that imports torch and prints a line, and
`pretrain_gpt.py` on synthetic tokens. Times are wall clock, from the start of the process until its line appears, so
exits do not count. The iteration's own time comes from its log line. A ratio compares times of one round.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = [sys.executable, "-c", "import torch; print('torch is here', flush=True)"]
TRAINING = [
    sys.executable, str(ROOT / "pretrain_gpt.py"), "--device", "cpu", "--mock-data", "--vocab-size", "1000",
    "--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "128",
    "--max-position-embeddings", "128", "--micro-batch-size", "4", "--global-batch-size", "4", "--lr", "1e-3",
    "--train-iters", "1", "--eval-iters", "0", "--log-interval", "1",
]  # fmt: skip
ITERATION = re.compile(r" iteration +1/ .*elapsed time per iteration \(ms\): ([\d.]+)")


def seconds_until(pattern: re.Pattern[str], command: list[str], folder: str) -> tuple[float, re.Match[str]]:
    """Measures the time from the start of a process to its first line that matches."""
    started = time.perf_counter()
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = None
        for line in process.stdout:
            if found is None and (match := pattern.search(line)):
                found = time.perf_counter() - started, match
    if found is None:
        raise SystemExit(f"{command[1]} ended with code {process.returncode} before its line appeared")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        seconds_until(ITERATION, TRAINING, folder)  # loads files into the page cache
        ratios = []
        for _ in range(rounds):
            torch, _ = seconds_until(re.compile("torch is here"), TORCH, folder)
            first, line = seconds_until(ITERATION, TRAINING, folder)
            step = float(line[1]) / 1000
            ratios.append(first / (torch + step))
            print(f"import torch {torch:.2f} s, iteration {step:.2f} s, to its end {first:.2f} s: {ratios[-1]:.2f}")
    print(f"ratio: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
