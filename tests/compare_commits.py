"""Runs two commits over a table of small trainings and compares every bit: rearranging code may not move a number.

    python tests/compare_commits.py BEFORE                 # against this checkout with its local changes
    python tests/compare_commits.py BEFORE AFTER --only adam muon --workers 2

For each row of `compare_commits_table.py` both commits train four iterations and save at two and four. The later commit
also resumes from the earlier one's save of two. Compared are all digits of the metrics (losses, norms, rates, samples),
every tensor and plain value of the files at four, and the later commit's `verify_checkpoint.py --compare`. Commands are
those that users type, so that modules may move; the package itself is not imported here.

Exit code 0: all equal; 1: a difference, or a run that failed; 2: nothing was compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.compare_commits_table import BASE, TABLE, Row  # noqa: E402  (started as a script)

CLOCKS = re.compile(r"second|tflops|utilisation|eta|memory|bytes|path|time")
# What differs between two runs of one commit: names of folders, processes and moments.
OF_A_RUN = frozenset(
    {
        "save",
        "load",
        "ckpt_step",
        "metrics_jsonl",
        "optimizer_offload_directory",
        "run_id",
        "history",
        "version",
        "host",
    }
)
LAST, EARLIER = "iter_0000004", 2
SECONDS = 600


class Difference(Exception):
    """The first thing that is not equal."""


@dataclass(frozen=True)
class Trees:
    before: Path
    after: Path
    folder: Path


def compare_row(row: Row, trees: Trees) -> None:
    """Raises the first `Difference` of the row."""
    folder = trees.folder / row.name
    shutil.rmtree(folder, ignore_errors=True)
    outputs = {name: folder / name for name in ("before", "after", "resumed")}
    train(row, trees.before, outputs["before"])
    train(row, trees.after, outputs["after"])
    same_metrics(outputs["before"], outputs["after"])
    same_steps(trees, outputs["before"] / LAST, outputs["after"] / LAST)
    train(row, trees.after, outputs["resumed"], "--load", str(outputs["before"]), "--ckpt-step", str(EARLIER))
    same_metrics(outputs["before"], outputs["resumed"], later_than=EARLIER)
    same_steps(trees, outputs["before"] / LAST, outputs["resumed"] / LAST)
    shutil.rmtree(folder)


def train(row: Row, tree: Path, output: Path, *more: str) -> None:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(row.ranks)] if row.ranks > 1 else []
    files = ["--save", str(output), "--metrics-jsonl", str(output / "metrics.jsonl")]
    output.mkdir(parents=True)
    words = [sys.executable, *start, "pretrain_gpt.py", *BASE.split(), *row.flags(output), *files, *more]
    run(words, tree)


def run(words: list[str], tree: Path) -> str:
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, cwd=tree, env=settings, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()[-3:]
        raise Difference(f"{words[-1] if 'tools' in words[1] else tree.name}: exit code {done.returncode}: {lines[:1]}")
    return done.stdout


def same_metrics(one: Path, other: Path, later_than: int = 0) -> None:
    for mine, theirs in zip(_records(one, later_than), _records(other, later_than), strict=True):
        for key in sorted({*mine, *theirs}):
            if mine.get(key) != theirs.get(key):
                place = f"{mine.get('split')}, iteration {mine.get('iteration')}"
                raise Difference(f"metrics: {place}: {key}: {mine.get(key)} and {theirs.get(key)}")


def _records(output: Path, later_than: int) -> list[dict[str, str]]:
    """Metrics in all digits, without clocks."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    if not lines:
        raise Difference(f"{output}: no metrics")
    kept = [line for line in lines if line["iteration"] > later_than]
    return [{key: repr(value) for key, value in line.items() if not CLOCKS.search(key)} for line in kept]


def same_steps(trees: Trees, one: Path, other: Path) -> None:
    """Compares the files as stored, if both steps have the same ones, and what the later commit reads from each."""
    names = [sorted(path.relative_to(step).as_posix() for path in step.rglob("*.pt")) for step in (one, other)]
    if names[0] == names[1]:
        for name in names[0]:
            contents = [torch.load(step / name, weights_only=True, map_location="cpu") for step in (one, other)]
            if found := first_difference(*contents):
                raise Difference(f"{one.name}/{name}: {found}")
    elif "state.json" not in "".join(names[0] + names[1]):
        raise Difference(f"{one.name}: {names[0]} and {names[1]}")
    run([sys.executable, "tools/verify_checkpoint.py", "--compare", str(one), str(other)], trees.after)


def first_difference(one: Any, other: Any, place: str = "") -> str | None:
    """First place where two contents differ, bit for bit; keys that differ in every run are skipped."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = (one.dtype, one.shape) == (other.dtype, other.shape) and _bytes(one) == _bytes(other)
        return None if same else f"{place}: tensors differ"
    if type(one) is not type(other):
        return f"{place}: {type(one).__name__} and {type(other).__name__}"
    if isinstance(one, dict):
        for key in sorted({*one, *other} - OF_A_RUN, key=str):
            if key not in one or key not in other:
                return f"{place}/{key}: only one has it"
            if found := first_difference(one[key], other[key], f"{place}/{key}"):
                return found
        return None
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return f"{place}: {len(one)} and {len(other)} values"
        found = (first_difference(a, b, f"{place}/{i}") for i, (a, b) in enumerate(zip(one, other, strict=True)))
        return next((each for each in found if each), None)
    return None if repr(one) == repr(other) else f"{place}: {one!r} and {other!r}"[:300]


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@contextlib.contextmanager
def checked_out(commit: str | None, folder: Path, name: str) -> Iterator[Path]:
    """Yields a worktree of the commit with its kernels built, or this checkout."""
    if commit is None:
        yield ROOT
        return
    tree = folder / name
    subprocess.run(["git", "worktree", "add", "--detach", "--force", str(tree), commit], cwd=ROOT, check=True)
    try:
        with contextlib.suppress(OSError):
            (tree / "build").symlink_to(ROOT / "build")  # compiled objects are found by their hash
        subprocess.run([sys.executable, "csrc/build.py"], cwd=tree, check=True)
        yield tree
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", metavar="BEFORE", help="a commit")
    parser.add_argument("after", metavar="AFTER", nargs="?", help="a commit; unset: this checkout as it is")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[row.name for row in TABLE])
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="rows at a time")
    arguments = parser.parse_args()
    rows = [row for row in TABLE if arguments.only is None or row.name in arguments.only]
    wrong = 0
    with (
        tempfile.TemporaryDirectory() as name,
        checked_out(arguments.before, Path(name), "before-tree") as before,
        checked_out(arguments.after, Path(name), "after-tree") as after,
        ThreadPoolExecutor(arguments.workers) as pool,
    ):
        trees = Trees(before, after, Path(name))
        for row, result in zip(rows, pool.map(lambda row: _result(row, trees), rows), strict=True):
            wrong += result is not None
            print(f"{row.name:32} {row.ranks} ranks  {result or 'equal'}", flush=True)
    print(f"{len(rows)} rows, {len(rows) - wrong} equal")
    return 2 if not rows else int(wrong > 0)


def _result(row: Row, trees: Trees) -> str | None:
    try:
        compare_row(row, trees)
    except (Difference, subprocess.TimeoutExpired, OSError, ValueError) as error:
        return str(error) if isinstance(error, Difference) else f"{type(error).__name__}: {error}"[:300]
    return None


if __name__ == "__main__":
    sys.exit(main())
