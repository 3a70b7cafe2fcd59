"""Draws the curves of runs with matplotlib: a colour per run, training as a line, validation dashed with marks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron.report.loss_curves import LoggedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = "os^Dv"
"""Of the validation sets of a run, from the first on again."""


def draw_curves(runs: Sequence[LoggedRun], value: str) -> Figure:
    from matplotlib.figure import Figure  # no pyplot: nothing is shown, so no screen is asked for

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
    """Of the validation set in this place, or of training."""
    if place is None:
        return {"linestyle": "-"}
    return {"linestyle": "--", "marker": _MARKERS[place % len(_MARKERS)], "markersize": 4}
