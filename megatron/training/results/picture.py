"""Draws the table: a bar of samples/s and one of perplexity for each row, published ones in grey."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron.report.results import SizeResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_OURS, _PUBLISHED = "C0", "0.65"


def draw_bars(rows: Sequence[SizeResult], source: str) -> Figure:
    from matplotlib.figure import Figure  # no pyplot: nothing is shown, so no screen is asked for

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
    """Rows without the value have no bar."""
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        if value is not None:
            bar = axes.barh(place, value, color=_PUBLISHED if row.published else _OURS)
            axes.bar_label(bar, fmt="{:.5g}", padding=3, fontsize=8)
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)


def _label(row: SizeResult) -> str:
    steps = "" if row.steps is None else f", {row.steps} steps"
    return f"{row.size}, {row.devices}{steps}"
