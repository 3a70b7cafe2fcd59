"""Shard: which part of a parameter a stored tensor holds.

Weights are stored 1-D and 2-D. Each has one logical view (fused QKV: `(groups, q_per_group + 2, head_dim, hidden)`),
and every split is a list of index ranges along one dimension of that view. Splitting, joining and moving to another
split are then slicing, whatever the parameter is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import torch

from megatron.state.division import Division
from megatron.state.ranges import Range, common, without


@dataclass(frozen=True)
class Shard:
    """The part of the parameter `name` that one rank holds."""

    name: str
    logical_shape: tuple[int, ...]
    """Shape of the whole parameter's logical view."""
    dim: int = 0
    """The dimension of the logical view that is split."""
    ranges: tuple[Range, ...] | None = None
    """Index ranges of `dim` held here, in their order in memory; None is all of it, () is nothing."""
    replica_axes: tuple[str, ...] = ()
    """Axes whose ranks hold a copy of this part and see different inputs: their gradients are summed."""
    fold: int = 1
    """How many dimensions from `dim` on the ranges count through as one (the heads of all KV groups, say)."""
    copies: tuple[Range, ...] = ()
    """The part of `ranges` that an earlier rank holds too: sums over all ranks, such as a norm, skip it."""
    division: Division | None = None
    """How ranks divide the elements of the stored tensor (ZeRO); None: each of them has all."""

    def __post_init__(self) -> None:
        dims = len(self.logical_shape)
        assert not dims or 0 <= self.dim <= self.dim + self.fold - 1 < dims, f"{self.name}: {self.dim}+{self.fold}"
        size = self.size
        for start, stop in self.ranges or ():
            assert 0 <= start <= stop <= size, f"{self.name}: range {start}:{stop} is outside 0:{size}"
        ordered = sorted(self.held)
        assert all(a[1] <= b[0] for a, b in pairwise(ordered)), f"{self.name}: ranges overlap: {self.ranges}"

    @property
    def size(self) -> int:
        """Length of the split dimension of the whole parameter."""
        return prod(self.logical_shape[self.dim : self.dim + self.fold]) if self.logical_shape else 1

    @property
    def split_shape(self) -> tuple[int, ...]:
        """The logical shape with the folded dimensions as one: `dim` of it is what the ranges count."""
        if not self.logical_shape:
            return ()
        return (*self.logical_shape[: self.dim], self.size, *self.logical_shape[self.dim + self.fold :])

    @property
    def held(self) -> tuple[Range, ...]:
        """The ranges held here, written out and without empty ones."""
        if self.ranges is None:
            return ((0, self.size),)
        return tuple((start, stop) for start, stop in self.ranges if stop > start)

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all of the parameter, in its order."""
        position = 0
        for start, stop in self.held:
            if start != position:
                return False
            position = stop
        return position == self.size

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the logical view of what is held here, folded as `split_shape`."""
        if not self.logical_shape:
            return ()
        held = sum(stop - start for start, stop in self.held)
        return (*self.split_shape[: self.dim], held, *self.split_shape[self.dim + 1 :])

    @property
    def in_three(self) -> Shard:
        """The same part with the logical view reshaped to three dimensions, of which the second is split."""
        shape = self.split_shape
        return replace(
            self,
            logical_shape=(prod(shape[: self.dim]), self.size, prod(shape[self.dim + 1 :])),
            dim=1,
            fold=1,
            ranges=self.held,
        )

    def only(self, start: int, stop: int) -> Shard:
        """What is held here from `start` to `stop` along the split dimension, counted in memory's order."""
        kept = [
            (held[0] + max(start - offset, 0), held[0] + min(stop - offset, held[1] - held[0]))
            for offset, held in _with_offsets(self.held)
        ]
        return replace(self, ranges=tuple((a, b) for a, b in kept if a < b), copies=())

    def runs(self) -> Iterator[tuple[int, int]]:
        """What is held here as (first element, number of elements) of the whole logical view, in memory's order."""
        outer, inner = prod(self.split_shape[: self.dim]), prod(self.split_shape[self.dim + 1 :])
        for row in range(outer):
            for start, stop in self.held:
                yield (row * self.size + start) * inner, (stop - start) * inner

    def splits_columns(self, rows: int) -> bool:
        """Whether `dim` is of the columns of a stored matrix with that many rows; else it is of its rows."""
        return rows <= prod(self.split_shape[: self.dim])

    def whole(self) -> Shard:
        """The same parameter, unsplit."""
        return replace(self, ranges=None, replica_axes=(), copies=(), division=None)

    def counted(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The parts of this rank's tensor that no earlier rank holds: over all ranks, every element is counted once.
        Padding rows are left out."""
        if not self.copies and self.division is None:
            return [self.view(tensor)]
        if not self.copies and self.division is not None and self.division.held[1] <= prod(self.local_shape):
            return [tensor] if tensor.numel() else []  # no padding to leave out
        return self._parts(tensor, lambda held: without(held, self.copies))

    def copied(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The parts that `counted` leaves out, because an earlier rank holds them too."""
        if not self.copies:
            return []
        return self._parts(tensor, lambda held: without(held, tuple(without(held, self.copies))))

    def held_in(self, tensor: torch.Tensor) -> Iterator[tuple[Range, torch.Tensor]]:
        """For each index range held here: the range, and its elements in this rank's tensor, of which it has a part
        where ranks divide it."""
        assert self.division is not None
        for offset, held in _with_offsets(self.held):
            runs = self._elements([(offset, offset + held[1] - held[0])])
            yield held, torch.cat([_in_piece(tensor, self.division.held, run) for run in runs])

    def _parts(self, tensor: torch.Tensor, which: Callable[[Range], Iterable[Range]]) -> list[torch.Tensor]:
        chosen = [
            (offset + start - held[0], offset + stop - held[0])
            for offset, held in _with_offsets(self.held)
            for start, stop in which(held)
        ]
        if self.division is None:
            return [_cut(self.view(tensor), self.dim, part) for part in chosen]
        parts = (_in_piece(tensor, self.division.held, run) for run in self._elements(chosen))
        return [part for part in parts if part.numel()]

    def _elements(self, parts: Sequence[Range]) -> Iterator[Range]:
        """Index ranges of the split dimension of what is stored here, as ranges of its elements in memory's order."""
        outer, inner = prod(self.split_shape[: self.dim]), prod(self.split_shape[self.dim + 1 :])
        length = self.local_shape[self.dim] if self.local_shape else 1
        for row in range(outer):
            for start, stop in parts:
                yield (row * length + start) * inner, (row * length + stop) * inner

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of the stored tensor in its logical local shape, without padding rows."""
        if tensor.numel() != prod(self.local_shape):
            rows = self.local_shape[0] if self.local_shape else 0
            padded = self.dim == 0 and tensor.shape[1:] == self.local_shape[1:] and tensor.shape[0] > rows
            assert padded, f"{self.name}: stored as {tuple(tensor.shape)}, which does not hold {self.local_shape}"
            tensor = tensor[:rows]
        return tensor.view(self.local_shape)

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """Slices this rank's part out of the whole parameter (logical or stored shape), in the logical local shape.

        A view of `full` if it is one range, else a copy.
        """
        full = full.view(self.split_shape)
        pieces = [full.narrow(self.dim, start, stop - start) for start, stop in self.held] if full.dim() else [full]
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces, self.dim) if pieces else full.narrow(self.dim, 0, 0)

    def put(self, full: torch.Tensor, local: torch.Tensor) -> None:
        """Writes this rank's stored tensor `local` to its place in the whole parameter."""
        copy_common(self, local, self.whole(), full)


def pieces(source: Shard, target: Shard) -> Iterator[tuple[Range, Range]]:
    """The intersection of two parts of one parameter: (range in the source's local view, in the target's) along dim.

    Copying each pair moves everything that the source has and the target wants.
    """
    assert (source.name, source.logical_shape) == (target.name, target.logical_shape), f"{source} is not {target}"
    assert source.dim == target.dim or source.is_whole or target.is_whole, (
        f"{source.name} is split along two dimensions"
    )
    source, target = along_one_dim(source, target)
    for source_offset, (a, b) in _with_offsets(source.held):
        for target_offset, (c, d) in _with_offsets(target.held):
            start, stop = max(a, c), min(b, d)
            if start < stop:
                here, there = source_offset + start - a, target_offset + start - c
                yield (here, here + stop - start), (there, there + stop - start)


def copy_common(source: Shard, stored: torch.Tensor, target: Shard, into: torch.Tensor) -> int:
    """Copies the intersection of two parts from one stored tensor to the other; returns the number of elements."""
    source, target = along_one_dim(source, target)
    dim = target.dim
    copied = 0
    for here, there in pieces(source, target):
        place = _cut(target.view(into), dim, there)
        place.copy_(_cut(source.view(stored), dim, here))
        copied += place.numel()
    return copied


def missing_ranges(parts: Sequence[Shard], wanted: Shard | None = None) -> list[Range]:
    """The indices of the split dimension that `wanted` (default: all) has and none of the parts has."""
    assert parts, "no parts given"
    split = next((part for part in parts if not part.is_whole), parts[0])
    assert all(part.is_whole or part.dim == split.dim for part in parts), f"{split.name} is split along two dimensions"
    if any(part.is_whole for part in parts):
        return []
    wanted = along_one_dim(split, wanted or split.whole())[1]
    covered = [held for part in parts for held in along_one_dim(part, wanted)[0].held]
    return [gap for held in wanted.held for gap in without(held, covered)]


def _in_piece(tensor: torch.Tensor, piece: Range, run: Range) -> torch.Tensor:
    """The part of a run of elements that is in `tensor`, which holds the elements of `piece`."""
    start, stop = common(run, piece)
    return tensor[start - piece[0] : max(stop, start) - piece[0]]


def along_one_dim(source: Shard, target: Shard) -> tuple[Shard, Shard]:
    """Both with ranges along the same dimension and fold. An unsplit parameter is one range of any dimension."""
    if (source.dim, source.fold) == (target.dim, target.fold):
        return source, target
    if source.is_whole:
        return replace(source, dim=target.dim, fold=target.fold, ranges=None), target
    if target.is_whole:
        return source, replace(target, dim=source.dim, fold=source.fold, ranges=None)
    fold = max(source.fold, target.fold)
    return _folded(source, fold), _folded(target, fold)


def _folded(spec: Shard, fold: int) -> Shard:
    """The same part with its ranges counted over more folded dimensions."""
    each = prod(spec.logical_shape[spec.dim + spec.fold : spec.dim + fold])
    ranges = None if spec.ranges is None else tuple((a * each, b * each) for a, b in spec.ranges)
    return replace(spec, fold=fold, ranges=ranges, copies=tuple((a * each, b * each) for a, b in spec.copies))


def _with_offsets(ranges: Iterable[Range]) -> Iterator[tuple[int, Range]]:
    """Each range with its offset in the local view."""
    offset = 0
    for start, stop in ranges:
        yield offset, (start, stop)
        offset += stop - start


def _cut(tensor: torch.Tensor, dim: int, part: Range) -> torch.Tensor:
    return tensor.narrow(dim, part[0], part[1] - part[0]) if tensor.dim() else tensor
