"""Compares ways of waiting threads (sleep, spin, ours) on an idle and on a busy machine.

    python benchmarks/busy_machine.py                    # without other work, and with two busy processes per core
    python benchmarks/busy_machine.py --rounds 2 --steps 4 --layers 2 --hidden 64 --heads 4 --seq 32 --vocab 512

Each contender is a whole run of pretrain_gpt.py. Contender "ours" has default settings. Contender "exported" has
OMP_WAIT_POLICY=PASSIVE from the shell, which ours should equal on a busy machine. Contender "spinning" has
GOMP_SPINCOUNT=300000, the default of the OpenMP library in torch's wheels, which ours should equal on an idle machine.
They take turns, and a ratio is the median over rounds of times within one round. A step's time is the median of a run's
steps after the first two.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.parts.turns import rotated, speed_over
from megatron.utils.process import usable_cpus

ROOT = Path(__file__).resolve().parent.parent
CONTENDERS: Mapping[str, tuple[str, ...]] = {
    "ours": ("-u", "OMP_WAIT_POLICY", "-u", "GOMP_SPINCOUNT"),
    "exported": (
        "-u",
        "GOMP_SPINCOUNT",
        "OMP_WAIT_POLICY=PASSIVE",
    ),
    "spinning": ("-u", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT=300000"),
}
_FIRST = 2
"""Number of first steps that are not counted."""


def run(name: str, shape: argparse.Namespace, folder: Path) -> float:
    """Runs a contender. Returns the median seconds per step from its metrics file."""
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    command = ["env", *CONTENDERS[name], sys.executable, str(ROOT / "pretrain_gpt.py"), *model_flags(shape)]
    done = subprocess.run([*command, "--metrics-jsonl", str(metrics)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-6000:]}")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    seconds = [record["seconds_per_iteration"] for record in records if record["split"] == "train"]
    return statistics.median(seconds[_FIRST:])


def model_flags(shape: argparse.Namespace) -> list[str]:
    return [
        *("--num-layers", str(shape.layers), "--hidden-size", str(shape.hidden)),
        *("--num-attention-heads", str(shape.heads), "--seq-length", str(shape.seq)),
        *("--max-position-embeddings", str(shape.seq), "--vocab-size", str(shape.vocab), "--mock-data"),
        *("--micro-batch-size", str(shape.batch), "--global-batch-size", str(shape.batch)),
        *("--train-iters", str(shape.steps + _FIRST), "--lr", "1e-3", "--num-workers", "0", "--eval-iters", "0"),
        *("--log-interval", "1", "--device", "cpu", "--seed", "1"),
    ]


@contextmanager
def other_work(processes: int) -> Iterator[None]:
    """Keeps this many busy processes running."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def measure(processes: int, shape: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with other_work(processes):
        for number in range(shape.rounds):
            for name in rotated(list(CONTENDERS), number):
                times[name].append(run(name, shape, folder))
    return times


def report(title: str, times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    print(f"\n{title}\n{'':10} {'ms/step':>9} {'this / ours':>12}")
    ratios = {name: statistics.median(speed_over(times, name)) for name in times}
    for name, seconds in times.items():
        print(f"{name:10} {statistics.median(seconds) * 1e3:9.1f} {ratios[name]:12.2f}")
    return ratios


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--load", type=int, nargs="+", default=[0, 2 * usable_cpus()], help="numbers of busy processes to measure with"
    )
    for name, default in (("rounds", 5), ("steps", 10), ("layers", 4), ("hidden", 128), ("heads", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("seq", 64), ("vocab", 4096), ("batch", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path, help="also write times and ratios here")
    return parser.parse_args()


def main() -> None:
    args = parse()
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        for processes in args.load:
            times = measure(processes, args, Path(folder))
            result[processes] = {"seconds": times, "time_over_ours": report(f"{processes} busy processes", times)}
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
