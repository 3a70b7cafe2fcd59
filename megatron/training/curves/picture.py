"""Draws the curves of runs with matplotlib: a colour per run, training as a line, validation dashed with marks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.training.curves.read import Run
from megatron.utils import picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLES: dict[str, dict[str, Any]] = {
    "train": {"linestyle": "-"},
    "valid": {"linestyle": "--", "marker": "o", "markersize": 4},
}


def write_picture(runs: Sequence[Run], value: str, output: Path) -> None:
    picture.write_picture(lambda: build_figure(runs, value), output)


def build_figure(runs: Sequence[Run], value: str) -> Figure:
    from matplotlib.figure import Figure  # no pyplot: nothing is shown, so no screen is asked for

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    for number, run in enumerate(runs):
        for split, points in run.curves.items():
            iterations = sorted(points)
            axes.plot(
                iterations,
                [points[i] for i in iterations],
                color=f"C{number % 10}",
                label=split if len(runs) == 1 else f"{run.name}: {split}",
                **_STYLES[split],
            )
    axes.set_xlabel("iteration")
    axes.set_ylabel(value.replace("_", " "))
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
