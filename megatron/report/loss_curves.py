"""Loss curves of runs: read from a metrics file (`--metrics-jsonl`) or a log, ours or Megatron-LM's, and drawn."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = dict[int, float]  # iteration -> value; if a resumed run repeats an iteration, its later value counts

_SPLIT = re.compile(r"train|valid|validation-.+")  # the test split has one number, not a curve
_TRAIN = re.compile(r"(?:^|[ \]])iteration +([0-9]{1,18})/ *\d+ \|")
_EVALUATION = re.compile(
    r"(?:^|[ \]])iteration +([0-9]{1,18})(?: on validation set(?: \((?P<name>validation-[^|]+)\))?)? \|"
)
# Names that a log writes differently. In other names it only replaces _ by a space.
_NAMES_IN_LOGS = {"learning_rate": "learning rate|lr", "mean_lm_loss": "lm loss"}
_NUMBER = r"([-+]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|nan|inf))"


@dataclass(frozen=True)
class LoggedRun:
    """Name of a run, and its points by split (train, validation, ...). A split without points is absent."""

    name: str
    curves: dict[str, Points] = field(default_factory=dict)

    def add(self, split: str, iteration: int, value: float) -> None:
        if -sys.float_info.max <= value <= sys.float_info.max:
            self.curves.setdefault(split, {})[iteration] = float(value)


def read_metrics(path: Path, value: str) -> LoggedRun:
    """Reads the curves of `value`, a key of the file's objects."""
    run = LoggedRun(str(path))
    for number, line in enumerate(_lines("--metrics-jsonl", path), start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _unusable("--metrics-jsonl", path, f"line {number} is not a JSON object ({error})") from None
        if not isinstance(row, dict):
            raise _unusable("--metrics-jsonl", path, f"line {number} is not a JSON object")
        split, iteration, y = str(row.get("split")), row.get("iteration"), row.get(value)
        if _SPLIT.fullmatch(split) and isinstance(iteration, int) and isinstance(y, int | float):
            run.add(split, iteration, y)
    return _with_points("--metrics-jsonl", path, value, run)


def read_log(path: Path, value: str) -> LoggedRun:
    """Reads the curves of `value`, a key of the metrics file. In a log the name is in words, values are rounded,
    and losses are means."""
    run = LoggedRun(str(path))
    words = _NAMES_IN_LOGS.get(value, value.replace("_", " "))
    number = re.compile(rf"\| (?:{words}|{re.escape(value)})(?: value)?:? {_NUMBER}(?: \||$)", re.IGNORECASE)
    for line in _lines("--log", path):
        if found := _TRAIN.search(line):
            split = "train"
        elif found := _EVALUATION.search(line):
            split = found["name"] or "valid"
        else:
            continue
        if y := number.search(line):
            run.add(split, int(found[1]), float(y[1]))
    return _with_points("--log", path, value, run)


def _lines(flag: str, path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise _unusable(flag, path, str(error.strerror)) from None


def _with_points(flag: str, path: Path, value: str, run: LoggedRun) -> LoggedRun:
    if not run.curves:
        raise _unusable(flag, path, f"no line with a finite {value}")
    return run


def _unusable(flag: str, path: Path, reason: str) -> ConfigError:
    made_by = "a run with --metrics-jsonl wrote" if flag == "--metrics-jsonl" else "a run's output went to"
    return ConfigError(f"{flag} {path}: {reason}; give the file that {made_by}")


# ---------------------------------------------------------------- in the terminal

TRAIN, VALIDATION = ("•", "*"), (("◆", "v"), ("▲", "a"), ("■", "b"), ("○", "o"))
"""Marks of the curves, with a fallback for terminals without Unicode. Beyond four, validation sets share marks."""


def draw_in_terminal(run: LoggedRun, *, width: int, height: int, plain: bool, title: str) -> str:
    """Draws a grid of characters: iterations to the right, the value upwards, both axes labelled."""
    sets = [split for split in run.curves if split != "train"]
    marks = {"train": TRAIN[plain]} | {name: pair[plain] for name, pair in zip(sets, cycle(VALIDATION), strict=False)}
    points = [(i, y) for curve in run.curves.values() for i, y in curve.items()]
    first, last = min(i for i, _ in points), max(i for i, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    grid = [[" "] * width for _ in range(height)]
    for split, curve in run.curves.items():
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
    legend = "   ".join(f"{marks[split]} {split}" for split in run.curves)
    lines.append(f"{'':10}{legend}")
    return "\n".join(lines)


# ---------------------------------------------------------------- with matplotlib

_MARKERS = "os^Dv"
"""Markers of a run's validation sets, reused beyond the last one."""


def draw_curves(runs: Sequence[LoggedRun], value: str) -> "Figure":
    """Draws each run in its own colour, training as a line, validation dashed with marks."""
    from matplotlib.figure import Figure  # no pyplot: needs no screen

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    for number, run in enumerate(runs):
        sets = [split for split in run.curves if split != "train"]
        for split, points in run.curves.items():
            iterations = sorted(points)
            place = sets.index(split) if split in sets else None
            axes.plot(
                iterations,
                [points[i] for i in iterations],
                color=f"C{number % 10}",
                label=split if len(runs) == 1 else f"{run.name}: {split}",
                **_style(place),
            )
    axes.set_xlabel("iteration")
    axes.set_ylabel(value.replace("_", " "))
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _style(place: int | None) -> dict[str, Any]:
    """Returns the style of the validation set at `place`, or of training if that is None."""
    if place is None:
        return {"linestyle": "-"}
    return {"linestyle": "--", "marker": _MARKERS[place % len(_MARKERS)], "markersize": 4}
