"""Compares writing one rank's checkpoint file, hashed and synced, with torch.save and fsync alone.

    python benchmarks/save.py --folder /fast/disk        # 512 MB, five rounds
    python benchmarks/save.py --megabytes 16 --rounds 2

"ours" hashes the bytes while writing them. "sha256" does the same with the former hash of checkpoints, which used to
take a second pass. The contenders take turns, and a ratio is the median over rounds of times within one round. "read"
hashes the written file from the page cache, as a load does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.parts.turns import rotated, speed_over
from megatron.checkpoint import storage


def plain(content: object, path: Path) -> None:
    with open(path, "xb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def hashed(algorithm: str) -> Callable[[object, Path], None]:
    def write(content: object, path: Path) -> None:
        storage.write_durable(path, lambda stream: torch.save(content, cast(IO[bytes], stream)), algorithm)

    return write


CONTENDERS = {"torch.save, fsync": plain, "ours": hashed(storage.HASH), "sha256": hashed("sha256")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="folder to write in (default: the system's temporary folder)")
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    content = {f"weight_{number}": torch.rand(2**20 // 4) for number in range(args.megabytes)}
    times: dict[str, list[float]] = {name: [] for name in (*CONTENDERS, "read")}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = Path(folder) / "file.pt"
        for number in range(args.rounds):
            for name in rotated(list(CONTENDERS), number):
                times[name].append(seconds(lambda name=name: CONTENDERS[name](content, path)))
                if name == "ours":
                    times["read"].append(seconds(lambda: storage.hash_file(path)))
                path.unlink()
    print(f"{args.megabytes} MB{'':14} {'GB/s':>6} {'of torch.save':>14}")
    for name, taken in times.items():
        ratio = 1 / statistics.median(speed_over(times, "torch.save, fsync", name))
        print(f"{name:20} {args.megabytes / 953.674 / statistics.median(taken):6.2f} {ratio:14.2f}")


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
