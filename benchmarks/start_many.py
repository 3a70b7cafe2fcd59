"""Measures time and memory of many gloo ranks on one machine until their first step is done.

    python benchmarks/start_many.py                     # 8, 16, 32 ranks
    python benchmarks/start_many.py --ranks 64          # takes some 200 MB of memory for each

Each size is one launch of torchrun: a tiny GPT on synthetic tokens, one thread per rank, tensor parallel 2 and pipeline
parallel 2. Times are wall clock, from the command until rank 0 prints the line. Ranks share the machine's cores, so
times grow with their number; CPU seconds per rank should not grow. Memory is each process's PSS, which divides shared
pages among their processes, and its private part.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINES = {
    "ranks met, groups made": re.compile(r"^running on \d+ x cpu"),
    "model made": re.compile(r"^number of parameters"),
    "first step done": re.compile(r"^ iteration +1/"),
}
TRAINING = [
    str(ROOT / "pretrain_gpt.py"), "--device", "cpu", "--mock-data", "--vocab-size", "97", "--num-layers", "2",
    "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16", "--max-position-embeddings", "16",
    "--micro-batch-size", "1", "--lr", "1e-3", "--train-iters", "10000", "--eval-iters", "0", "--log-interval", "1",
    "--num-workers", "0", "--cpu-threads", "1", "--tensor-model-parallel-size", "2",
    "--pipeline-model-parallel-size", "2",
]  # fmt: skip


@dataclass(frozen=True)
class Usage:
    """Memory and CPU time of one rank at the end of its first step."""

    shared: float
    """PSS in MB, which divides shared pages among their processes."""
    private: float
    cpu: float
    """CPU seconds."""


def start(ranks: int, folder: str) -> tuple[dict[str, float], list[Usage]]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command = [*launcher, *TRAINING, "--global-batch-size", str(ranks)]
    came: dict[str, float] = {}
    began = time.perf_counter()
    with (
        open(Path(folder) / "stderr", "w+") as errors,
        subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True) as launched,
    ):
        assert launched.stdout is not None
        for line in launched.stdout:
            for name, pattern in LINES.items():
                if name not in came and pattern.search(line):
                    came[name] = time.perf_counter() - began
            if len(came) == len(LINES):
                break
        used = [usage(rank) for rank in children(launched.pid)]
        launched.terminate()
        for _ in launched.stdout:  # drains the ranks' last output
            pass
    if len(came) < len(LINES):
        said = Path(folder, "stderr").read_text()[-2000:]
        raise SystemExit(f"{ranks} ranks ended with code {launched.returncode}: {said}")
    return came, used


def children(parent: int) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                yield int(path.parent.name)
        except FileNotFoundError:
            continue


def usage(process: int) -> Usage:
    sizes = dict(re.findall(r"^(\w+): +(\d+) kB", Path(f"/proc/{process}/smaps_rollup").read_text(), re.MULTILINE))
    private = int(sizes["Private_Clean"]) + int(sizes["Private_Dirty"])
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return Usage(int(sizes["Pss"]) / 1024, private / 1024, ticks / os.sysconf("SC_CLK_TCK"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32], help="numbers of ranks, multiples of 4")
    for ranks in parser.parse_args().ranks:
        with tempfile.TemporaryDirectory() as folder:
            came, used = start(ranks, folder)
        times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in came.items())
        cpu = [rank.cpu for rank in used]
        shared, private = sum(rank.shared for rank in used), max(rank.private for rank in used)
        print(
            f"{ranks} ranks: {times}; CPU seconds per rank {sum(cpu) / len(cpu):.1f} (at most {max(cpu):.1f}); memory "
            f"{shared:.0f} MB in total, {shared / len(used):.0f} MB per rank, at most {private:.0f} MB of it private",
            flush=True,
        )


if __name__ == "__main__":
    main()
