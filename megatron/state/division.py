"""Ranges of indices, and `Division`: the elements of a tensor that each rank of a group has.

Several tensors are concatenated into one row of elements, which is cut into equal shares, one per rank. A Division
computes ranges on demand, because a list of all ranks' ranges would grow with the number of ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Range = tuple[int, int]
"""First index, and the index after the last."""
DEALT = -1


def even_ranges(size: int, parts: int, index: int) -> tuple[Range, ...]:
    """Returns a tuple with the range of the `index`-th of `parts` contiguous pieces. If `size` is not divisible by
    `parts`, the first pieces are one longer."""
    base, longer = divmod(size, parts)
    start = index * base + min(index, longer)
    return ((start, start + base + (index < longer)),)


def common(a: Range, b: Range) -> Range:
    """Returns (start, stop) of the intersection of two ranges; start >= stop if it is empty."""
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
    """Group of ranks that divide tensors or hold copies of them, with the place of this rank in the group."""

    name: str
    """Name of the group: the same on all members, and different from the names of other groups."""
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
    """Number of elements of the row that each rank has."""
    offset: int = 0
    """Index in the row at which the tensor begins."""
    row: int = 0
    """Index of the row, if the group divides several; DEALT (-1) if `dealt` made the Division."""

    @property
    def held(self) -> Range:
        """The elements that this rank has."""
        return self.held_by(self.group.rank)

    def held_by(self, rank: int) -> Range:
        """The elements of the tensor that a rank has. If it has none, the range is (0, 0) or (elements, elements)."""
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
    """Divides tensors among the ranks of a group in equal shares. `sizes`: number of elements by name.

    `first_has`: number of other elements that the first rank has. They count towards its share."""
    total = sum(sizes.values())
    if group.size > 1:
        first_has = min(first_has, -(-total // (group.size - 1)))
    share = max(-(-(first_has + total) // group.size), 1)
    found, position = {}, min(first_has, share)
    for name, size in sizes.items():
        found[name] = Division(group, size, share, position, row=DEALT)
        position += size
    return found
