"""Draws the curves of a run as a grid of characters."""

from __future__ import annotations

from itertools import cycle

from megatron.report.loss_curves import LoggedRun

TRAIN, VALIDATION = ("•", "*"), (("◆", "v"), ("▲", "a"), ("■", "b"), ("○", "o"))
"""The second where the terminal has no Unicode; one for each validation set, from the first on again."""


def draw_in_terminal(run: LoggedRun, *, width: int, height: int, plain: bool, title: str) -> str:
    """Iterations to the right, the value upwards, both axes labelled."""
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
