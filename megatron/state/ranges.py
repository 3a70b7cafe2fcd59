"""Ranges of indices: from the first index to the one after the last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Range = tuple[int, int]


def even_ranges(size: int, parts: int, index: int) -> tuple[Range, ...]:
    """The `index`-th of `parts` contiguous pieces of `size`; the first ones are one longer if it does not divide."""
    base, longer = divmod(size, parts)
    start = index * base + min(index, longer)
    return ((start, start + base + (index < longer)),)


def common(a: Range, b: Range) -> Range:
    """The intersection; one that is empty begins at its end or after it."""
    return max(a[0], b[0]), min(a[1], b[1])


def without(held: Range, removed: Sequence[Range]) -> Iterator[Range]:
    """Subtracts ranges from one range."""
    position, stop = held
    for a, b in sorted(removed):
        if min(a, stop) > position:
            yield position, min(a, stop)
        position = max(position, b)
    if position < stop:
        yield position, stop


def piece_of(elements: int, offset: int, share: int, number: int) -> Range:
    """The elements of a tensor, which begins at `offset` of the row, that lie in share `number`. An empty range is at
    the beginning or the end of the tensor."""
    start, stop = common((offset, offset + elements), (number * share, (number + 1) * share))
    if start < stop:
        return start - offset, stop - offset
    return (0, 0) if (number + 1) * share <= offset else (elements, elements)


def pieces_between(start: int, stop: int, offset: int, share: int) -> Iterator[tuple[int, Range]]:
    """Splits the elements `start` to `stop` of a tensor, which begins at `offset`, by share: (number of the share,
    range)."""
    position = start
    while position < stop:
        number = (offset + position) // share
        end = min(stop, (number + 1) * share - offset)
        yield number, (position, end)
        position = end
