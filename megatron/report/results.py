"""Reads samples/s and perplexity of runs, from metrics files (`--metrics-jsonl`) or published rows, and draws them."""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from megatron.errors import ConfigError
from megatron.utils.typed import typed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class SizeResult:
    size: str
    devices: str
    samples_per_second: float | None
    perplexity: float | None = None
    steps: int | None = None
    published: bool = False


@dataclass(frozen=True)
class Published:
    source: str
    """Publisher of the rows, as shown in the legend."""
    rows: tuple[SizeResult, ...]


def row_of_run(size: str, devices: str, path: Path) -> SizeResult:
    """Returns the row of a run. samples/s is the median of the logged intervals; the first one warms up and counts only
    if it is the only one. The perplexity is from the last evaluation of the validation split."""
    lines = list(_last_run(_objects(path)))
    trained = [_number(path, line, "samples_per_second") for line in lines if "samples_per_second" in line]
    evaluated = [_number(path, line, "lm_loss_ppl") for line in lines if line.get("split") == "valid"]
    if not trained and not evaluated:
        raise _unusable("--run", path, "no line with samples/s or a perplexity")
    return SizeResult(
        size=size,
        devices=devices,
        samples_per_second=median(trained[1:] or trained) if trained else None,
        perplexity=evaluated[-1] if evaluated else None,
        steps=max(line["iteration"] for line in lines),
    )


def read_published(path: Path) -> Published:
    text = _text("--published", path)
    try:
        found = typed(Published, json.loads(text))
        for row in found.rows:
            if not all(
                0 <= value < math.inf for value in (row.samples_per_second, row.perplexity) if value is not None
            ):
                raise ValueError(
                    f"the row of {row.size[:100]}: samples_per_second or perplexity is negative or not finite"
                )
        return replace(found, rows=tuple(replace(row, published=True) for row in found.rows))
    except (ValueError, RecursionError) as error:
        raise _unusable("--published", path, f"does not hold a source and its rows ({error})") from None


def _number(path: Path, line: dict[str, Any], name: str) -> float:
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > sys.float_info.max:
        raise _unusable("--run", path, f"iteration {line['iteration']}: {name} is {str(value)[:100]}, not a number")
    return float(value)


def _last_run(lines: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the lines from where iterations last began again, because resumed and new runs append to one file."""
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
        except (ValueError, RecursionError):
            line = None
        if not isinstance(line, dict) or type(line.get("iteration")) is not int:
            raise _unusable("--run", path, f"line {number} is not a record of an iteration")
        yield line


def _text(flag: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(flag, path, getattr(error, "strerror", None) or "not UTF-8") from None


def _unusable(flag: str, path: Path, reason: str) -> ConfigError:
    wanted = (
        "the file that a run with --metrics-jsonl wrote"
        if flag == "--run"
        else "a file like examples/gpt2_8p/published.json"
    )
    return ConfigError(f"{flag} {path}: {reason}; give {wanted}")


# ---------------------------------------------------------------- the picture

_OURS, _PUBLISHED = "C0", "0.65"


def draw_bars(rows: Sequence[SizeResult], source: str) -> "Figure":
    """Draws a bar of samples/s and one of perplexity for each row, published ones in grey."""
    from matplotlib.figure import Figure  # no pyplot: needs no screen

    figure = Figure(figsize=(11, 1.6 + 0.34 * len(rows)), layout="constrained")
    speed, quality = figure.subplots(1, 2, sharey=True)
    _bars(speed, rows, [row.samples_per_second for row in rows])
    speed.set_xscale("log")
    speed.set_xlabel("samples/s")
    speed.set_yticks(range(len(rows)), [_label(row) for row in rows])
    speed.invert_yaxis()
    _bars(quality, rows, [row.perplexity for row in rows])
    quality.set_xlabel("perplexity (PPL)")
    quality.set_xlim(left=0)
    for color, label in ((_OURS, "measured here"), (_PUBLISHED, f"published {source}")):
        quality.bar([0], [0], color=color, label=label)
    figure.legend(*quality.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure


def _bars(axes: Any, rows: Sequence[SizeResult], values: Sequence[float | None]) -> None:
    """Draws a bar for each row that has the value."""
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        if value is not None:
            bar = axes.barh(place, value, color=_PUBLISHED if row.published else _OURS)
            axes.bar_label(bar, fmt="{:.5g}", padding=3, fontsize=8)
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)


def _label(row: SizeResult) -> str:
    steps = "" if row.steps is None else f", {row.steps} steps"
    return f"{row.size}, {row.devices}{steps}"
