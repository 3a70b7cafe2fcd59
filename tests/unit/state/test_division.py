"""Division: every element of every tensor is in one share, and `dealt` gives all ranks equally much."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron.distributed.parallel_state import Axis
from megatron.state.division import Division, Members, dealt


def axis_of(size: int) -> Axis:
    return Axis("dp", 0, size, tuple(range(size)))


@pytest.mark.parametrize("seed", range(20))
def test_the_pieces_of_a_tensor_are_all_of_it_once(seed: int) -> None:
    draw = random.Random(seed)
    elements, offset, share = draw.randint(0, 40), draw.randint(0, 30), draw.randint(1, 12)
    seen, division = [], Division(Members("dp", 0, 1), elements, share, offset)
    for number in range(1 + (offset + elements) // share):
        start, stop = division.held_by(number)
        assert 0 <= start <= stop <= elements
        seen += list(range(start, stop))
        if start < stop:
            assert (offset + start) // share == (offset + stop - 1) // share == number
    assert seen == list(range(elements))


@pytest.mark.parametrize("seed", range(20))
def test_the_ranks_that_have_a_range_of_elements(seed: int) -> None:
    draw = random.Random(seed)
    elements, offset, share = draw.randint(1, 40), draw.randint(0, 30), draw.randint(1, 12)
    start, stop = sorted(draw.randint(0, elements) for _ in range(2))
    division = Division(Members("dp", 0, 1), elements, share, offset)
    found = list(division.shares((start, stop)))
    assert [element for _, piece in found for element in range(*piece)] == list(range(start, stop))
    for number, (first, last) in found:
        whole = division.held_by(number)
        assert whole[0] <= first < last <= whole[1]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("first_has", [0, 5, 60, 10_000])
def test_dealt_to_ranks(ranks: int, first_has: int) -> None:
    sizes = {"a": 40, "b": 1, "c": 0, "d": 63}
    shares = dealt(sizes, axis_of(ranks).members, first_has)
    work = [0] * ranks
    for name, size in sizes.items():
        pieces = [shares[name].held_by(rank) for rank in range(ranks)]
        assert [element for piece in pieces for element in range(*piece)] == list(range(size))
        work = [sum_ + piece[1] - piece[0] for sum_, piece in zip(work, pieces, strict=True)]
    assert sum(work) == 104
    if ranks > 1:
        others, first = work[1:], work[0]
        largest = max(*others, first + min(first_has, 104 // (ranks - 1)))
        assert largest <= -(-(104 + first_has) // ranks) or (first_has > 104 and first == 0), work


def test_a_group_has_one_name_on_all_its_ranks() -> None:
    axis = axis_of(4)
    names = {replace(axis, rank=rank).members.name for rank in range(4)}
    other = Axis("dp", 0, 2, (4, 5)).members.name
    assert len(names) == 1 and other not in names
