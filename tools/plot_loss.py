"""Draws the loss curve of a run in the terminal, from the file that `--metrics-jsonl` wrote.

python tools/plot_loss.py --metrics-jsonl metrics.jsonl
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that is not installed

from megatron.errors import ConfigError
from megatron.utils.command_line import Parser, integer, run_tool

Curve = dict[int, float]  # iteration -> loss
MARKS = {"train": ("•", "*"), "valid": ("◆", "v")}  # the second where the terminal has no Unicode


def read_curves(path: Path, value: str) -> dict[str, Curve]:
    """Of training and validation. A resumed run appends to its file: the later line of an iteration counts."""
    curves: dict[str, Curve] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number} is not a JSON object ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"line {number} is not a JSON object")
        split, iteration, y = str(row.get("split")), row.get("iteration"), row.get(value)
        if split in MARKS and isinstance(iteration, int) and isinstance(y, int | float) and math.isfinite(y):
            curves.setdefault(split, {})[iteration] = float(y)
    return curves


def draw(curves: Mapping[str, Curve], *, width: int, height: int, marks: Mapping[str, str], title: str) -> str:
    """A grid of characters: time to the right, the value upwards, both axes labelled."""
    points = [(i, y) for curve in curves.values() for i, y in curve.items()]
    first, last = min(i for i, _ in points), max(i for i, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    grid = [[" "] * width for _ in range(height)]
    for split, curve in curves.items():
        for iteration, y in curve.items():
            column = round((iteration - first) / max(1, last - first) * (width - 1))
            row = round((high - y) / ((high - low) or 1.0) * (height - 1))
            grid[row][column] = marks[split]
    lines = [f"{'':9}{title}"]
    for row, cells in enumerate(grid):
        label = f"{high - (high - low) * row / (height - 1):8.3f} " if row % 3 == 0 or row == height - 1 else " " * 9
        lines.append(f"{label}|{''.join(cells).rstrip()}")
    lines.append(" " * 9 + "+" + "-" * width)
    lines.append(f"{'':9} {first:<{width // 2}}{'iteration ' + str(last):>{width - width // 2}}")
    legend = "   ".join(f"{marks[split]} {split}" for split in curves)
    lines.append(f"{'':10}{legend}")
    return "\n".join(lines)


def main() -> int:
    return run_tool("error", plot)


def plot() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--metrics-jsonl", type=Path, required=True, help="the file a run wrote its metrics to")
    parser.add_argument("--value", default="lm_loss", help="which number of each line to draw")
    parser.add_argument("--width", type=integer(10), default=72, help="columns of the plot")
    parser.add_argument("--height", type=integer(3), default=16, help="rows of the plot")
    args = parser.parse_known_flags(sys.argv[1:])
    way_out = "give the file that a run with --metrics-jsonl wrote"
    try:
        curves = read_curves(args.metrics_jsonl, args.value)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--metrics-jsonl {args.metrics_jsonl}: {reason}; {way_out}") from None
    if not curves:
        raise ConfigError(f"--metrics-jsonl {args.metrics_jsonl}: no line with a finite {args.value}; {way_out}")
    plain = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    marks = {split: pair[plain] for split, pair in MARKS.items()}
    print(draw(curves, width=args.width, height=args.height, marks=marks, title=args.value))


if __name__ == "__main__":
    sys.exit(main())
