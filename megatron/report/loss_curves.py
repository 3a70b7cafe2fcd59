"""Reads the curves of a run from its metrics file (`--metrics-jsonl`) or from its log, ours or Megatron-LM's."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from megatron.errors import ConfigError

Points = dict[int, float]  # iteration -> value; a resumed run repeats iterations, and the later one counts

_SPLIT = re.compile(r"train|valid|validation-.+")  # the one number of the test split is no curve
_TRAIN = re.compile(r"(?:^|[ \]])iteration +([0-9]{1,18})/ *\d+ \|")
_EVALUATION = re.compile(
    r"(?:^|[ \]])iteration +([0-9]{1,18})(?: on validation set(?: \((?P<name>validation-[^|]+)\))?)? \|"
)
_NAMES_IN_LOGS = {"learning_rate": "learning rate|lr", "mean_lm_loss": "lm loss"}  # the others: a space for each _
_NUMBER = r"([-+]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|nan|inf))"


@dataclass(frozen=True)
class LoggedRun:
    """One curve per split that has points."""

    name: str
    curves: dict[str, Points] = field(default_factory=dict)

    def add(self, split: str, iteration: int, value: float) -> None:
        if -sys.float_info.max <= value <= sys.float_info.max:
            self.curves.setdefault(split, {})[iteration] = float(value)


def read_metrics(path: Path, value: str) -> LoggedRun:
    """`value` is a key of the file's objects."""
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
    """`value` is a key of the metrics file; a line of the log has it in words, rounded, the loss as a mean."""
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
