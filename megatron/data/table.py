"""What a run will read, in a table that is printed before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    split: str
    source: str
    weight: float | None
    sequences: int
    tokens: int  # of one epoch
    samples: int  # that the run takes
    epochs: float  # that these samples are


_HEADINGS = ("split", "source", "weight", "sequences", "tokens", "samples", "epochs")


def render(rows: Sequence[Row]) -> str:
    """Aligned columns; names to the left, numbers to the right."""
    cells = [_HEADINGS] + [
        (
            row.split,
            row.source,
            "-" if row.weight is None else f"{row.weight:.4g}",
            f"{row.sequences:,}",
            f"{row.tokens:,}",
            f"{row.samples:,}",
            f"{row.epochs:.2f}",
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADINGS))]
    lines = []
    for line in cells:
        left = [text.ljust(width) for text, width in zip(line[:2], widths[:2])]
        right = [text.rjust(width) for text, width in zip(line[2:], widths[2:])]
        lines.append("  ".join(left + right).rstrip())
    return "\n".join(lines)
