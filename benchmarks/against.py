"""Compares a benchmark of this checkout with an earlier commit's, in turns on the same machine.

    python benchmarks/against.py 33be30b train_step.py --dtype bf16 --steps 3 --only plain
    python benchmarks/against.py 33be30b parallel.py --only layouts --rounds 1

The script unpacks the commit into a temporary folder and builds its kernels. Each round runs the benchmark of both
checkouts, in alternating order. A ratio is this checkout's time over the commit's, as the median over rounds: above 1
it has become slower. Contenders without code of this project, such as torch, show how much the machine drifts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("train_step.py", "parallel.py")


def unpack(commit: str, folder: Path) -> None:
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
    build = [sys.executable, "setup.py", "build_ext", "--inplace"]
    done = subprocess.run(build, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{commit}: the build failed: {done.stderr[-2000:]}")


def measure(checkout: Path, script: str, arguments: list[str], result: Path) -> dict[str, float]:
    command = [sys.executable, str(checkout / "benchmarks" / script), *arguments, "--json", str(result)]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return times(json.loads(result.read_text()))


def times(content: dict[str, Any]) -> dict[str, float]:
    """Returns seconds by contender (train_step.py), or milliseconds per step and bubbles by layout (parallel.py)."""
    if "seconds" in content:
        return {name: statistics.median(found) for name, found in content["seconds"].items()}
    layouts = {row["layout"]: row["ms_per_step"] for row in content["layouts"]}
    return layouts | {f"bubble of {row['schedule']}": row["bubble"] for row in content["bubbles"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("script", choices=SCRIPTS)
    parser.add_argument("--turns", type=int, default=3, help="runs of each checkout (3)")
    args, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        before = Path(name, "checkout")
        before.mkdir()
        unpack(args.commit, before)
        found: list[tuple[dict[str, float], dict[str, float]]] = []
        for turn in range(args.turns):
            pair: dict[Path, dict[str, float]] = {}
            for checkout in (before, ROOT) if turn % 2 == 0 else (ROOT, before):
                pair[checkout] = measure(checkout, args.script, arguments, Path(name, "result.json"))
            found.append((pair[before], pair[ROOT]))
            print(f"turn {turn + 1} of {args.turns} done", file=sys.stderr, flush=True)
    for contender in found[0][0]:
        ratios = [after[contender] / earlier[contender] for earlier, after in found]
        then, now = (statistics.median(pair[side][contender] for pair in found) for side in (0, 1))
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        print(f"{contender}: {args.commit} {then:.4g}, now {now:.4g}, ratio {statistics.median(ratios):.3f} ({spread})")


if __name__ == "__main__":
    main()
