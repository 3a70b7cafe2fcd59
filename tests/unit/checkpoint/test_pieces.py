"""Any elements of any split of a tensor can be read from any other split, divided among any files."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from math import prod

import pytest
import torch
from torch import Tensor

from megatron.checkpoint import slices
from megatron.checkpoint.manifest import Slice, TensorRecord
from megatron.errors import CheckpointError
from megatron.state.division import Range, even_ranges
from megatron.state.shard import Shard, split_size, unsplit

# (logical shape, split dimension, how many dimensions are counted as one)
VIEWS = [((12, 5), 0, 1), ((3, 4, 2, 5), 0, 1), ((2, 8, 3), 1, 1), ((5, 8), 1, 1), ((4, 3, 2, 5), 0, 2), ((8,), 0, 1)]
Elements = Callable[[Slice, Range], Tensor]


def splits(logical: tuple[int, ...], dim: int, fold: int, ranks: int) -> list[Shard]:
    whole = Shard("w", logical, dim=dim, fold=fold)
    if ranks == 1:
        return [whole]
    return [replace(whole, ranges=even_ranges(split_size(whole), ranks, rank)) for rank in range(ranks)]


def stored_in(specs: list[Shard], whole: Tensor) -> tuple[TensorRecord, Elements, list[int]]:
    """Record of a tensor that these ranks stored, a reader of its elements, and a list of how many were read."""
    kept = {str(number): spec.take(whole).contiguous().view(-1) for number, spec in enumerate(specs)}
    read: list[int] = []

    def elements(piece: Slice, held: Range) -> Tensor:
        read.append(held[1] - held[0])
        return kept[piece.file][slice(*held)]

    parts = tuple(Slice(str(n), (), spec.ranges, tuple(spec.local_shape)) for n, spec in enumerate(specs))
    return TensorRecord(specs[0].logical_shape, str(whole.dtype), specs[0].dim, parts, specs[0].fold), elements, read


@pytest.mark.parametrize("view", VIEWS, ids=str)
@pytest.mark.parametrize("saved", [1, 2, 4])
@pytest.mark.parametrize("wanted", [1, 2, 3])
def test_any_elements_of_any_split(view: tuple, saved: int, wanted: int) -> None:
    logical, dim, fold = view
    whole = torch.arange(prod(logical), dtype=torch.float32)
    record, elements, _ = stored_in(splits(logical, dim, fold, saved), whole.view(logical))
    draw = random.Random(str(view))
    for spec in splits(logical, dim, fold, wanted):
        local = spec.take(whole.view(logical)).contiguous().view(-1)
        for _ in range(8):
            start, stop = sorted(draw.randint(0, len(local)) for _ in range(2))
            found = slices.read_elements(spec, spec.local_shape, whole.dtype, (start, stop), record, elements)
            assert torch.equal(found, local[start:stop]), (spec, start, stop)


def test_no_more_is_read_than_lies_between_the_first_and_the_last() -> None:
    """Two ranks saved a matrix by rows. One of four ranks reads only its own rows, and only its piece of them."""
    whole = torch.arange(64.0).view(16, 4)
    record, elements, read = stored_in(splits((16, 4), 0, 1, 2), whole)
    spec = splits((16, 4), 0, 1, 4)[1]
    slices.read_elements(spec, spec.local_shape, whole.dtype, (0, 16), record, elements)
    assert read == [16]
    read.clear()
    slices.read_elements(spec, spec.local_shape, whole.dtype, (4, 8), record, elements)
    assert read == [4]
    same = splits((16, 4), 0, 1, 2)[0]
    read.clear()
    slices.read_elements(same, same.local_shape, whole.dtype, (3, 6), record, elements)
    assert read == [3]


def test_padding_rows_are_zero() -> None:
    """Three of seven rows are padding in the tensor that is read; no file has them."""
    whole = torch.arange(1.0, 9.0).view(4, 2)
    record, elements, _ = stored_in(splits((4, 2), 0, 1, 2), whole)
    spec = Shard("w", (4, 2))
    found = slices.read_elements(spec, (7, 2), whole.dtype, (3, 14), record, elements)
    assert torch.equal(found, torch.cat([whole.view(-1)[3:], torch.zeros(6)]))
    assert not slices.read_elements(spec, (7, 2), whole.dtype, (9, 12), record, elements).any()


def test_a_gap_is_refused() -> None:
    specs = splits((8, 3), 0, 1, 2)
    record, elements, _ = stored_in(specs[:1], torch.zeros(8, 3))
    with pytest.raises(CheckpointError, match=r"w: indices \[\(4, 8\)\] of dimension 0 are in no file"):
        slices.read_elements(unsplit(specs[0]), (8, 3), torch.float32, (0, 24), record, elements)
