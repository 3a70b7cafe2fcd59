"""Where a rank's piece lies in the whole parameter, and sums over all of it.

A piece is a range of the elements of what tensor parallelism left on this rank. Rules that look at rows, columns or all
of a parameter add up what they find in their piece, and then over the ranks that hold the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from megatron.data_parallel import TrainingStore
from megatron.distributed import collectives
from megatron.distributed.state import Axis
from megatron.optimizer.matrices import Matrix
from megatron.optimizer.norms import sum_of_wide_squares, widest
from megatron.state.division import Range
from megatron.state.shard import Shard, counted_parts

Axes = tuple[Axis, ...]


@dataclass(frozen=True)
class Rectangle:
    """Some columns of some rows that lie one after the other in a piece."""

    elements: slice
    """Of the piece."""
    rows: slice
    columns: slice
    """Of the matrix that is stored here."""

    def of(self, piece: Tensor) -> Tensor:
        """A view: [rows, columns]."""
        if piece.dim() == 2:
            return piece[self.rows, self.columns]
        return piece[self.elements].view(self.rows.stop - self.rows.start, -1)


def rectangles(held: Range, columns: int) -> Iterator[Rectangle]:
    """A range of a matrix's elements: the end of a row, whole rows, the beginning of a row."""
    position, stop = held
    while position < stop:
        row, first = divmod(position, columns)
        whole = (stop - position) // columns if first == 0 else 0
        end = position + whole * columns if whole else min(stop, (row + 1) * columns)
        last = columns if whole else first + end - position
        yield Rectangle(slice(position - held[0], end - held[0]), slice(row, row + max(whole, 1)), slice(first, last))
        position = end


@dataclass(frozen=True)
class Extent:
    """The part of one parameter that one rank updates."""

    rows: Shard
    columns: Shard
    """Which rows and columns of the whole matrix are here; of what is no matrix each element is a row."""
    is_matrix: bool
    held: Range
    """The range of the stored elements that this rank updates, without rows that pad a vocabulary."""
    axes: Axes
    """The axes to sum over: their ranks hold the other parts."""
    counted: Tensor | None
    """[rows here]: 1, or 0 where another of these ranks holds the same row and counts it. None is 1 in all."""

    @staticmethod
    def of(grads: TrainingStore, name: str, matrix: Matrix) -> Extent:
        parameter, spec = grads.parameter(name), matrix.spec
        is_matrix = parameter.dim() == 2
        count = prod(spec.logical_shape) // matrix.columns if is_matrix else prod(spec.logical_shape)
        rows, columns = rows_and_columns(spec, count)
        start, stop = grads.held(name)
        stop = min(stop, prod(rows.local_shape) * prod(columns.local_shape))
        axes = tuple(axis for axis in (matrix.tp, grads.divided_over(name)) if axis.size > 1)
        counted = None
        if rows.copies and matrix.tp.size > 1:
            counted = torch.zeros(rows.local_shape, device=grads.weight(name).device)
            for part in counted_parts(rows, counted):
                part.fill_(1.0)
            counted = counted.view(-1)
        return Extent(rows, columns, is_matrix, (min(start, stop), stop), axes, counted)

    @property
    def elements(self) -> int:
        """The number of elements of the whole parameter."""
        return prod(self.rows.logical_shape) * prod(self.columns.logical_shape)

    def rectangles(self) -> Iterator[Rectangle]:
        return rectangles(self.held, prod(self.columns.local_shape))

    def weighted(self, squares: Tensor, rows: slice) -> Tensor:
        """Squares of a rectangle, 0 where another rank counts them."""
        if self.counted is None:
            return squares
        return squares * self.counted[rows].to(squares.dtype).view(-1, *[1] * (squares.dim() - 1))

    def row_and_column_sums(self, piece: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's contribution to the sums of squares of each whole row and column of the matrix."""
        local = [piece.new_zeros(spec.local_shape).view(-1) for spec in (self.rows, self.columns)]
        for part in self.rectangles():
            squares = self.weighted(part.of(piece).square(), part.rows)
            local[0][part.rows] += squares.sum(1)
            local[1][part.columns] += squares.sum(0)
        whole = [piece.new_zeros(spec.logical_shape) for spec in (self.rows, self.columns)]
        for spec, sums, there in zip((self.rows, self.columns), local, whole, strict=True):
            spec.put(there, sums)
        return whole[0].view(-1), whole[1].view(-1)

    def square_sum(self, piece: Tensor) -> Tensor:
        """This rank's contribution to the sum of all squares, in double precision."""
        if self.counted is None:
            return sum_of_wide_squares([piece]).to(piece.device)
        parts = (self.weighted(part.of(piece).square(), part.rows).double().sum() for part in self.rectangles())
        return sum(parts, torch.zeros((), dtype=torch.float64, device=piece.device))


def rows_and_columns(spec: Shard, rows: int) -> tuple[Shard, Shard]:
    """Splits the logical view of a parameter into a view of its rows and one of its columns. `rows`: the number of rows
    of the whole stored matrix."""
    shape, dims = spec.logical_shape, 0
    while prod(shape[:dims]) < rows:
        dims += 1
    assert prod(shape[:dims]) == rows, f"{spec.name}: {rows} rows of {shape}"
    sides = [Shard(spec.name, side or (1,)) for side in (shape[:dims], shape[dims:])]
    if not shape or spec.ranges is None:
        return sides[0], sides[1]
    at = int(spec.dim >= dims)
    sides[at] = replace(sides[at], dim=spec.dim - dims * at, ranges=spec.ranges, fold=spec.fold, copies=spec.copies)
    return sides[0], sides[1]


def extents(grads: TrainingStore, matrices: Mapping[str, Matrix]) -> dict[str, Extent]:
    return {name: Extent.of(grads, name, matrix) for name, matrix in matrices.items()}


def sums_over(axes: Sequence[Axes], parts: Iterable[Tensor]) -> list[Tensor]:
    """Sums each part over its axes, in double precision; parts with the same axes share a message. A collective.

    What is kept on two pipeline stages must be summed there in the same order: its message holds nothing else."""
    wide = [part.to(widest(part.device)) for part in parts]
    numbers: dict[Axes, list[int]] = {}
    for number, over in enumerate(axes):
        numbers.setdefault(over, []).append(number)
    for over, mine in numbers.items():
        if over:
            flat = torch.cat([wide[number].reshape(-1) for number in mine])
            for axis in over:
                collectives.all_reduce(flat, axis)
            for number, total in zip(mine, flat.split([wide[number].numel() for number in mine]), strict=True):
                wide[number] = total.view(wide[number].shape)
    return wide
