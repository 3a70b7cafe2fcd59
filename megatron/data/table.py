"""Renders the table of the data that a run will read, printed before the first step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.errors import ConfigError

OFTEN = 4.0  # warn if a source is repeated for more epochs
_MOST_ROWS = 20
_LARGEST, _MOST_REPEATED = 5, 2  # rows per split that are kept in an abbreviated table


@dataclass(frozen=True)
class MixtureRow:
    split: str
    source: str
    weight: float | None  # the source's share in the split
    sequences: int
    tokens: int  # of one epoch
    samples: int  # used by the run
    epochs: float  # of these samples


_HEADINGS = ("split", "source", "weight", "sequences", "tokens", "samples", "epochs")


def render_mixture(rows: Sequence[MixtureRow]) -> str:
    """Renders aligned columns: names to the left, numbers to the right."""
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


def abbreviated(rows: Sequence[MixtureRow]) -> list[MixtureRow]:
    """Returns a short table unchanged; of a long one, per split: the largest and most repeated sources, a row for the
    rest, and the sum."""
    if len(rows) <= _MOST_ROWS:
        return list(rows)
    shown: list[MixtureRow] = []
    for split in dict.fromkeys(row.split for row in rows):
        own = [row for row in rows if row.split == split]
        kept = sorted(own, key=lambda row: -row.samples)[:_LARGEST]
        kept += [row for row in sorted(own, key=lambda row: -row.epochs)[:_MOST_REPEATED] if row not in kept]
        kept = [row for row in own if row in kept]
        rest = [row for row in own if row not in kept]
        shown += kept
        if rest:
            shown.append(_together(f"... {len(rest):,} more", rest))
        if len(own) > 1:
            shown.append(_together(f"all {len(own):,} sources", own))
    return shown


def _together(name: str, rows: Sequence[MixtureRow]) -> MixtureRow:
    weights = [row.weight for row in rows if row.weight is not None]
    tokens = sum(row.tokens for row in rows)
    return MixtureRow(
        split=rows[0].split,
        source=name,
        weight=sum(weights) if weights else None,
        sequences=sum(row.sequences for row in rows),
        tokens=tokens,
        samples=sum(row.samples for row in rows),
        epochs=sum(row.epochs * row.tokens for row in rows) / max(1, tokens),
    )


def _repeated(rows: Sequence[MixtureRow], more_than: float) -> list[MixtureRow]:
    """Returns the training sources repeated for more epochs than this, most repeated first."""
    found = [row for row in rows if row.split == "train" and row.epochs > more_than]
    return sorted(found, key=lambda row: -row.epochs)


def _others(count: int) -> str:
    return "1 other source" if count == 1 else f"{count:,} other sources"


def warn_repeated(rows: Sequence[MixtureRow]) -> Iterator[str]:
    found = _repeated(rows, OFTEN)
    if found:
        others = f" (and {_others(len(found) - 1)} more than {OFTEN:g} times)" if len(found) > 1 else ""
        yield (
            f"training reads {found[0].source} {found[0].epochs:.1f} times{others}; add data to it or lower its "
            f"weight (--max-epochs N rejects a run that repeats a source more than N times)"
        )


def refuse_repeated(rows: Sequence[MixtureRow], max_epochs: float | None) -> None:
    found = [] if max_epochs is None else _repeated(rows, max_epochs)
    if found:
        row, others = found[0], f", and {_others(len(found) - 1)} too often" if len(found) > 1 else ""
        weight = "" if row.weight is None else f"weight {row.weight:.4g}, "
        raise ConfigError(
            f"--max-epochs {max_epochs:g}: training would read {row.source} {row.epochs:.2f} times ({weight}"
            f"{row.tokens:,} tokens, {row.samples:,} samples){others}; add data to it, lower its weight, train for "
            f"fewer steps, or raise --max-epochs"
        )
