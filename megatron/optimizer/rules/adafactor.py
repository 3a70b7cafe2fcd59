"""Adafactor: keeps only row and column means of a matrix's second moment (Shazeer and Stern, 2018).

Row and column means, and the RMS of an update and of a weight, cover the whole parameter, however it is split or
divided. A rank's piece is a range of the elements that tensor parallelism gave it (`Extent`). The rank sums its piece,
and two small all-reduces give all ranks the same numbers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from megatron.config.sections.optimizer import OptimizerConfig
from megatron.data_parallel import TrainingStore
from megatron.distributed import collectives
from megatron.distributed.parallel_state import Axis
from megatron.optimizer.matrices import Matrix
from megatron.optimizer.norms import sum_of_wide_squares, widest
from megatron.optimizer.rules.base import COLUMNS, ROWS, Control, Gated, LiveState, Slot, Slots
from megatron.state.division import Range
from megatron.state.shard import Shard, counted_parts

Axes = tuple[Axis, ...]


@dataclass(frozen=True)
class Rectangle:
    """Block of adjacent columns and rows within a piece."""

    elements: slice
    """Slice of the piece's elements."""
    rows: slice
    columns: slice
    """Slice of the columns of the matrix stored here."""

    def of(self, piece: Tensor) -> Tensor:
        """View of the rectangle: [rows, columns]."""
        if piece.dim() == 2:
            return piece[self.rows, self.columns]
        return piece[self.elements].view(self.rows.stop - self.rows.start, -1)


def rectangles(held: Range, columns: int) -> Iterator[Rectangle]:
    """Splits a range of a matrix's elements into the end of a row, whole rows, and the beginning of a row."""
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
    """Part of one parameter that one rank updates."""

    rows: Shard
    columns: Shard
    """Rows and columns of the whole matrix that this rank holds. Each element of a non-matrix parameter is a row."""
    is_matrix: bool
    held: Range
    """Range of the stored elements that this rank updates, without rows that pad a vocabulary."""
    axes: Axes
    """Axes to sum over: their ranks hold the other parts."""
    counted: Tensor | None
    """[rows of this rank]: 1, or 0 if another of these ranks counts the same row. None means 1 everywhere."""

    @staticmethod
    def of(grads: TrainingStore, name: str, matrix: Matrix) -> "Extent":
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
        """Number of elements of the whole parameter."""
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
    """Splits the logical view of a parameter into a view of its rows and one of its columns. `rows`: number of rows of
    the whole stored matrix."""
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


def sums_over(axes: Sequence[Axes], parts: Iterable[Tensor]) -> list[Tensor]:
    """Sums each part over its axes, in double precision; parts with the same axes share a message. A collective.
    Parameters held by two pipeline stages must be summed in the same order on both, so their message holds nothing
    else."""
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


@dataclass(frozen=True)
class _Job:
    """Update of one slot in one step."""

    slot: Slot
    grad: Tensor
    extent: Extent
    mixed: Tensor
    """Weight of this step's squared gradient in the second moment."""
    open: float | Tensor

    @property
    def sums(self) -> Iterator[Tensor]:
        """Yields this rank's parts of the whole parameter's sums that the second moment needs."""
        if self.extent.is_matrix:
            yield from self.extent.row_and_column_sums(self.grad)

    def mix(self, sums: Sequence[Tensor], eps: float) -> list[Tensor]:
        """Updates the second moment and returns it. For a skipped step it returns the moment that the step would have
        given, because the caller divides by it and the stored moment may still be zero."""
        if self.extent.is_matrix:
            counts = [prod(side.logical_shape) for side in (self.extent.columns, self.extent.rows)]
            kept = [self.slot.state[ROWS], self.slot.state[COLUMNS]]
            new = [total / count + eps for total, count in zip(sums, counts, strict=True)]
        else:
            kept, new = [self.slot.state["exp_avg_sq"]], [self.grad.square() + eps]
        mixed = [old.lerp(one.to(old.dtype), self.mixed.to(old.dtype)) for old, one in zip(kept, new, strict=True)]
        for old, one in zip(kept, mixed, strict=True):
            old.add_((one - old) * self.open)
        return mixed

    def direction(self, moments: Sequence[Tensor]) -> Tensor:
        """Gradient divided by the root of its second moment."""
        if not self.extent.is_matrix:
            return self.grad * moments[0].rsqrt()
        rows, columns = moments
        sides = (self.extent.rows, (rows / rows.mean()).rsqrt()), (self.extent.columns, columns.rsqrt())
        row, column = (spec.take(side).reshape(-1) for spec, side in sides)
        found = torch.zeros_like(self.grad)  # rows that pad a vocabulary do not change
        for part in self.extent.rectangles():
            torch.mul(part.of(self.grad), row[part.rows, None], out=part.of(found)).mul_(column[part.columns])
        return found


@dataclass(frozen=True, eq=False)
class Adafactor(LiveState):
    config: OptimizerConfig
    extents: Mapping[str, Extent]
    """Extents by name, for every parameter that this rule updates."""
    fused: bool = True

    def slot(self, name: str, tensor: Tensor) -> Slot:
        extent = self.extents[name]
        state = {"exp_avg_sq": torch.zeros_like(tensor, requires_grad=False)}
        if extent.is_matrix:
            sides = {ROWS: extent.rows, COLUMNS: extent.columns}
            state = {kind: tensor.new_zeros(prod(side.logical_shape)) for kind, side in sides.items()}
        if self.config.adafactor_beta1:
            state["exp_avg"] = torch.zeros_like(tensor, requires_grad=False)
        return Slot(name, tensor, state, torch.zeros((), dtype=torch.float32, device=tensor.device))

    def step(self, store: Slots, shards: Sequence[str], control: Control) -> None:
        (slots, grads), (lr, weight_decay, skip) = store.of(shards), control
        config, gated = self.config, Gated.by(skip, grads)
        jobs = []
        for slot, grad in zip(slots, gated.grads, strict=True):
            slot.step += gated.open
            mixed = slot.step.double().clamp(min=1.0) ** config.adafactor_decay_rate
            jobs.append(_Job(slot, grad, self.extents[slot.name], mixed, gated.open))
        sizes, moments = self._second_moments(jobs)
        lengths = self._lengths(jobs, moments)
        for job, size, own, length in zip(jobs, sizes, moments, lengths, strict=True):
            slot, count = job.slot, job.extent.elements
            rate = self._rate(lr, slot.step, (size / count).sqrt())
            clip = ((length / count).sqrt() / config.adafactor_clip_threshold).clamp(min=1.0)
            move = job.direction(own).mul_((rate / clip).to(slot.tensor.dtype))
            if config.adafactor_beta1:
                mean = slot.state["exp_avg"]
                move = mean.lerp(move, 1.0 - config.adafactor_beta1)
                mean.add_((move - mean) * gated.open)
            slot.tensor.mul_(1.0 - lr * weight_decay * gated.open)
            slot.tensor.sub_(move.mul_(gated.open))

    def _second_moments(self, jobs: Sequence[_Job]) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Sum of the weight's squares and the result of `mix`, for each job."""
        axes, parts, ends = [], [], [0]
        for job in jobs:
            own = [job.extent.square_sum(job.slot.tensor), *job.sums]
            axes += [job.extent.axes] * len(own)
            parts += own
            ends.append(len(parts))
        totals = sums_over(axes, parts)
        own_totals = [totals[start:stop] for start, stop in pairwise(ends)]
        sizes = [own[0] for own in own_totals]
        return sizes, [job.mix(own[1:], self.config.adafactor_eps1) for job, own in zip(jobs, own_totals, strict=True)]

    def _lengths(self, jobs: Sequence[_Job], moments: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Sum of the direction's squares, for each job. Directions are recomputed when used: keeping them would take as
        much memory as the gradients."""
        axes = [job.extent.axes for job in jobs]
        parts = (job.extent.square_sum(job.direction(own)) for job, own in zip(jobs, moments, strict=True))
        return sums_over(axes, parts)

    def _rate(self, lr: float, step: Tensor, size: Tensor) -> Tensor:
        """Learning rate of a parameter; `size` is its root mean square."""
        config = self.config
        rate = torch.full_like(size, lr)
        if config.adafactor_relative_step:
            rate = rate.clamp(max=step.to(size.dtype).clamp(min=1.0).rsqrt())
        return rate * size.clamp(min=config.adafactor_eps2) if config.adafactor_scale_parameter else rate
