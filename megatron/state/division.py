"""Division: which elements of a tensor each rank of an axis has, as a rule: a list would grow with the number of ranks.

Tensors are concatenated to one row of elements, which is cut into equal shares, one for each rank of the axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron.state.shard import Range, common


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


@dataclass(frozen=True)
class Members:
    """Ranks that divide tensors, or hold copies of them, as this rank sees them."""

    name: str
    """Equal on its members, different from that of all other groups."""
    rank: int
    """This rank's number in the group."""
    size: int


@dataclass(frozen=True)
class Division:
    """How the ranks of a group divide one tensor."""

    group: Members
    share: int
    """Elements of the row that each rank has."""
    offset: int = 0
    """Where the tensor begins in the row."""

    def held(self, elements: int, rank: int | None = None) -> Range:
        """The range that a rank of the group (default: this one) holds of a tensor with so many elements."""
        return piece_of(elements, self.offset, self.share, self.group.rank if rank is None else rank)


def dealt(sizes: Mapping[str, int], group: Members, first_has: int = 0) -> dict[str, Division]:
    """Deals tensors, given by their numbers of elements, to the ranks of a group: equally much to each, where the first
    has work of `first_has` elements already."""
    total = sum(sizes.values())
    if group.size > 1:
        first_has = min(first_has, -(-total // (group.size - 1)))
    share = max(-(-(first_has + total) // group.size), 1)
    found, position = {}, min(first_has, share)
    for name, size in sizes.items():
        found[name] = Division(group, share, position)
        position += size
    return found
