"""Division: which elements of a tensor each rank of an axis has, as a rule: a list would grow with the number of ranks.

Tensors are concatenated to one row of elements, which is cut into equal shares, one for each rank of the axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.state.ranges import Range, piece_of


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
    elements: int
    """Of the whole tensor."""
    share: int
    """Elements of the row that each rank has."""
    offset: int = 0
    """Where the tensor begins in the row."""

    @property
    def held(self) -> Range:
        """The elements that this rank has."""
        return self.held_by(self.group.rank)

    def held_by(self, rank: int) -> Range:
        """The elements that a rank of the group has."""
        return piece_of(self.elements, self.offset, self.share, rank)


def dealt(sizes: Mapping[str, int], group: Members, first_has: int = 0) -> dict[str, Division]:
    """Deals tensors, given by their numbers of elements, to the ranks of a group: equally much to each, where the first
    has work of `first_has` elements already."""
    total = sum(sizes.values())
    if group.size > 1:
        first_has = min(first_has, -(-total // (group.size - 1)))
    share = max(-(-(first_has + total) // group.size), 1)
    found, position = {}, min(first_has, share)
    for name, size in sizes.items():
        found[name] = Division(group, size, share, position)
        position += size
    return found
