"""A row of the table: from a run's metrics file (`--metrics-jsonl`), or from a file of published ones."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Row:
    size: str
    devices: str
    samples_per_second: float | None
    perplexity: float | None
    steps: int | None
    published: bool = False


@dataclass(frozen=True)
class Published:
    source: str
    """By whom the rows were published, and that they are theirs."""
    rows: tuple[Row, ...]


def row_of_run(size: str, devices: str, path: Path) -> Row:
    """samples/s is the median of the logged intervals, the first left out where there are others (it warms up);
    the perplexity is that of the last evaluation of the validation split."""
    lines = list(_last_run(_objects(path)))
    trained = [float(line["samples_per_second"]) for line in lines if "samples_per_second" in line]
    evaluated = [float(line["lm_loss_ppl"]) for line in lines if line.get("split") == "valid"]
    if not trained and not evaluated:
        raise _unusable("--run", path, "no line with samples/s or a perplexity")
    return Row(
        size=size,
        devices=devices,
        samples_per_second=median(trained[1:] or trained) if trained else None,
        perplexity=evaluated[-1] if evaluated else None,
        steps=max(int(line["iteration"]) for line in lines),
    )


def read_published(path: Path) -> Published:
    try:
        content = json.loads(_text("--published", path))
        rows = tuple(
            Row(
                size=str(row["size"]),
                devices=str(row["devices"]),
                samples_per_second=float(row["samples_per_second"]),
                perplexity=row.get("perplexity"),
                steps=row.get("steps"),
                published=True,
            )
            for row in content["rows"]
        )
        return Published(str(content["source"]), rows)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _unusable("--published", path, f"no source with rows ({type(error).__name__}: {error})") from None


def _last_run(lines: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The lines from where iterations last began again: a file is appended to, by a resumed run and by a new one."""
    kept: list[dict[str, Any]] = []
    trained = -math.inf
    for line in lines:
        if line.get("split") == "train":
            if line["iteration"] <= trained:
                kept = []
            trained = line["iteration"]
        kept.append(line)
    yield from kept


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    for number, text in enumerate(_text("--run", path).splitlines(), start=1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict) or not isinstance(line.get("iteration"), int):
            raise _unusable("--run", path, f"line {number} is no record of an iteration")
        yield line


def _text(flag: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(flag, path, getattr(error, "strerror", None) or "not UTF-8") from None


def _unusable(flag: str, path: Path, reason: str) -> ConfigError:
    wanted = "the file that a run with --metrics-jsonl wrote" if flag == "--run" else "a file like the recipe's own"
    return ConfigError(f"{flag} {path}: {reason}; give {wanted}")
