"""Ranges of indices, and `Division`: the elements of a tensor that each rank of an axis has.

A Division is a rule, because a list would grow with the number of ranks. Tensors are concatenated to one row of
elements, which is cut into equal shares, one for each rank of the axis.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Range = tuple[int, int]
"""First index, and the index after the last."""
DEALT = -1


def even_ranges(size: int, parts: int, index: int) -> tuple[Range, ...]:
    """The `index`-th of `parts` contiguous pieces of `size`. If it does not divide, the first pieces are one longer."""
    base, longer = divmod(size, parts)
    start = index * base + min(index, longer)
    return ((start, start + base + (index < longer)),)


def common(a: Range, b: Range) -> Range:
    """The intersection. An empty one does not begin before its end."""
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


@dataclass(frozen=True)
class Members:
    """Ranks that divide tensors, or hold copies of them, as this rank sees them."""

    name: str
    """Name: equal on all members, different from all other groups' names."""
    rank: int
    """This rank's number in the group."""
    size: int


@dataclass(frozen=True)
class Division:
    """Division of one tensor among the ranks of a group."""

    group: Members
    elements: int
    """Number of elements of the whole tensor."""
    share: int
    """Number of elements of the row per rank."""
    offset: int = 0
    """Beginning of the tensor in the row."""
    row: int = 0
    """Number of the row among those that the group divides; DEALT (-1) for tensors that are dealt."""

    @property
    def held(self) -> Range:
        """The elements that this rank has."""
        return self.held_by(self.group.rank)

    def held_by(self, rank: int) -> Range:
        """The elements that a rank of the group has. An empty range is at the beginning or the end of the tensor."""
        first = rank * self.share - self.offset
        start, stop = common((0, self.elements), (first, first + self.share))
        if start < stop:
            return start, stop
        return (0, 0) if first < 0 else (self.elements, self.elements)

    def shares(self, wanted: Range) -> Iterator[tuple[int, Range]]:
        """Splits a range of the tensor's elements by the ranks that have them: (rank, range)."""
        position, last = wanted
        while position < last:
            rank = (self.offset + position) // self.share
            stop = min(last, (rank + 1) * self.share - self.offset)
            yield rank, (position, stop)
            position = stop


def dealt(sizes: Mapping[str, int], group: Members, first_has: int = 0) -> dict[str, Division]:
    """Deals tensors, given by their numbers of elements, to the ranks of a group in equal shares. Of the first rank's
    share, `first_has` elements are taken already."""
    total = sum(sizes.values())
    if group.size > 1:
        first_has = min(first_has, -(-total // (group.size - 1)))
    share = max(-(-(first_has + total) // group.size), 1)
    found, position = {}, min(first_has, share)
    for name, size in sizes.items():
        found[name] = Division(group, size, share, position, row=DEALT)
        position += size
    return found
