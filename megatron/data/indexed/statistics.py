"""The distribution of document lengths, in numbers and as a histogram."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.data.indexed.dataset import IndexedDataset

PERCENTILES = (1, 10, 25, 50, 75, 90, 99)
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Bin:
    """The documents with `first` to `last` tokens."""

    first: int
    last: int
    documents: int

    @property
    def label(self) -> str:
        return f"{self.first:,}" if self.first == self.last else f"{self.first:,}-{self.last:,}"


@dataclass(frozen=True)
class Statistics:
    documents: int
    sequences: int
    tokens: int
    shortest: int
    longest: int
    longest_document: int  # its number
    mean: float
    empty: int
    empty_sequences: int
    percentiles: dict[int, int]
    bins: tuple[Bin, ...]


def document_lengths(data: IndexedDataset) -> np.ndarray:
    """Returns the length of each document in tokens, computed in blocks to save memory."""
    lengths = np.empty(data.num_documents, dtype=np.int64)
    for start in range(0, len(lengths), _BLOCK):
        stop = min(start + _BLOCK, len(lengths))
        lengths[start:stop] = np.diff(data.document_bounds(start, stop)) // data.dtype.itemsize
    return lengths


def length_statistics(data: IndexedDataset) -> Statistics:
    lengths = document_lengths(data)
    some = len(lengths) > 0
    longest = int(np.argmax(lengths)) if some else -1
    cuts = np.percentile(lengths, PERCENTILES, method="nearest") if some else np.zeros(len(PERCENTILES))
    return Statistics(
        documents=data.num_documents,
        sequences=len(data),
        tokens=data.num_tokens,
        shortest=int(lengths.min()) if some else 0,
        longest=int(lengths[longest]) if some else 0,
        longest_document=longest,
        mean=float(lengths.mean()) if some else 0.0,
        empty=int(np.count_nonzero(lengths == 0)),
        empty_sequences=int(np.count_nonzero(data.sequence_lengths == 0)),
        percentiles={name: int(cut) for name, cut in zip(PERCENTILES, cuts, strict=True)},
        bins=tuple(log_bins(lengths)),
    )


def log_bins(lengths: np.ndarray) -> list[Bin]:
    """Returns bins of doubling width (0, 1, 2-3, 4-7, ...) from the shortest document to the longest."""
    if not len(lengths):
        return []
    powers = np.frexp(lengths.astype(np.float64))[1]  # of 0: 0, of 1: 1, of 2 and 3: 2, ...
    counts = np.bincount(powers)
    begun = int(np.argmax(counts > 0))
    return [Bin(1 << p >> 1, max((1 << p) - 1, 0), int(n)) for p, n in enumerate(counts) if p >= begun]


def draw_histogram(bins: Sequence[Bin], *, width: int = 50, block: str = "█") -> str:
    """Draws the histogram for a terminal."""
    most = max((b.documents for b in bins), default=1)
    left = max((len(b.label) for b in bins), default=6)
    right = max((len(f"{b.documents:,}") for b in bins), default=1)
    lines = [f"{'tokens':>{left}}  {'documents':>{max(right, 9)}}"]
    for b in bins:
        cells = max(round(b.documents / most * width), int(b.documents > 0))
        lines.append(f"{b.label:>{left}}  {b.documents:>{max(right, 9)},}  {block * cells}".rstrip())
    return "\n".join(lines)


def draw_svg(bins: Sequence[Bin], title: str) -> str:
    """Draws the histogram as SVG."""
    from xml.sax.saxutils import escape

    row, left, wide = 22, 190, 520
    most = max((b.documents for b in bins), default=1)
    height = 60 + row * len(bins)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + wide + 110}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="12" y="22" font-size="15">{escape(title)}</text>',
        f'<text x="{left - 10}" y="44" text-anchor="end" fill="#555">tokens in a document</text>',
        f'<text x="{left}" y="44" fill="#555">documents</text>',
    ]
    for number, b in enumerate(bins):
        y, bar = 52 + row * number, b.documents / most * wide
        parts.append(f'<text x="{left - 10}" y="{y + 15}" text-anchor="end">{b.label}</text>')
        parts.append(f'<rect x="{left}" y="{y + 2}" width="{bar:.1f}" height="{row - 5}" fill="#4472a8"/>')
        parts.append(f'<text x="{left + bar + 6:.1f}" y="{y + 15}">{b.documents:,}</text>')
    return "\n".join([*parts, "</svg>", ""])


def draw_png(bins: Sequence[Bin], title: str) -> bytes:
    """Draws the histogram as PNG. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.3 * len(bins)), layout="constrained")
    axes = figure.subplots()
    axes.barh([b.label for b in bins], [b.documents for b in bins])
    axes.invert_yaxis()
    axes.set(title=title, xlabel="documents", ylabel="tokens in a document")
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()
