"""Shard: the part of a parameter that a stored tensor holds.

Stored weights have one or two dimensions. Each weight has one logical view (fused QKV: `(groups, q_per_group + 2,
head_dim, hidden)`), and every split is a list of index ranges along one dimension of that view. Splitting, joining and
resharding therefore use the same code for every parameter.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import torch

from megatron.state.division import Division, Range, common, without


@dataclass(frozen=True)
class Shard:
    """The part of the parameter `name` that one rank holds."""

    name: str
    logical_shape: tuple[int, ...]
    """Shape of the whole parameter's logical view."""
    dim: int = 0
    """The dimension of the logical view that is split."""
    ranges: tuple[Range, ...] | None = None
    """Index ranges of `dim` that this rank holds, in their order in memory; None is all of it, () is nothing."""
    replica_axes: tuple[str, ...] = ()
    """Axes whose ranks hold a copy of this part and see different inputs: their gradients are summed."""
    fold: int = 1
    """Number of dimensions from `dim` on that the ranges index as one, such as the heads of all KV groups."""
    copies: tuple[Range, ...] = ()
    """Ranges that an earlier rank holds too. Sums over all ranks, such as a norm, skip them on this rank."""
    division: Division | None = None
    """Division of the stored tensor's elements among ranks (ZeRO); None if each rank has all elements."""
    stored: tuple[int, ...] | None = None
    """Shape of the stored tensor, padding rows included; None if only the shape of the held part is known."""
    split_over: tuple[str, ...] = ()
    """Axes whose ranks hold the other parts. Norms are summed over these axes."""

    def __post_init__(self) -> None:
        dims = len(self.logical_shape)
        assert not dims or 0 <= self.dim <= self.dim + self.fold - 1 < dims, f"{self.name}: {self.dim}+{self.fold}"
        size = split_size(self)
        for start, stop in self.ranges or ():
            assert 0 <= start <= stop <= size, f"{self.name}: range {start}:{stop} is outside 0:{size}"
        ordered = sorted(self.held)
        assert all(a[1] <= b[0] for a, b in pairwise(ordered)), f"{self.name}: ranges overlap: {self.ranges}"

    @property
    def held(self) -> tuple[Range, ...]:
        """`ranges` without empty ones; if `ranges` is None, one range that covers the whole dimension."""
        if self.ranges is None:
            return ((0, split_size(self)),)
        return tuple((start, stop) for start, stop in self.ranges if stop > start)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the held part in the logical view. Folded dimensions count as one, as in `split_shape`."""
        return _with_length(self, sum(stop - start for start, stop in self.held))

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of the stored tensor in its logical local shape, without padding rows."""
        if tensor.numel() != prod(self.local_shape):
            rows = self.local_shape[0] if self.local_shape else 0
            padded = self.dim == 0 and tensor.shape[1:] == self.local_shape[1:] and tensor.shape[0] > rows
            assert padded, f"{self.name}: a stored shape {tuple(tensor.shape)} cannot contain {self.local_shape}"
            tensor = tensor[:rows]
        return tensor.view(self.local_shape)

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """Slices this rank's part out of the whole parameter (logical or stored shape), in the logical local shape.

        Returns a view of `full` if the part is one range, else a copy.
        """
        full = full.view(split_shape(self))
        pieces = [full.narrow(self.dim, start, stop - start) for start, stop in self.held] if full.dim() else [full]
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces, self.dim) if pieces else full.narrow(self.dim, 0, 0)

    def put(self, full: torch.Tensor, local: torch.Tensor) -> None:
        """Writes this rank's stored tensor `local` to its place in the whole parameter."""
        copy_common(self, local, unsplit(self), full)


def split_size(shard: Shard) -> int:
    """Length of the split dimension of the whole parameter."""
    shape = shard.logical_shape
    return prod(shape[shard.dim : shard.dim + shard.fold]) if shape else 1


def split_shape(shard: Shard) -> tuple[int, ...]:
    """The whole parameter's logical shape, with the folded dimensions as one dimension. `ranges` index that one."""
    return _with_length(shard, split_size(shard))


def _with_length(shard: Shard, length: int) -> tuple[int, ...]:
    shape = shard.logical_shape
    return (*shape[: shard.dim], length, *shape[shard.dim + shard.fold :]) if shape else ()


def is_whole(shard: Shard) -> bool:
    """True if this rank holds the whole parameter, with its ranges in ascending order."""
    position = 0
    for start, stop in shard.held:
        if start != position:
            return False
        position = stop
    return position == split_size(shard)


def unsplit(shard: Shard) -> Shard:
    """The same parameter, unsplit."""
    return Shard(shard.name, shard.logical_shape, shard.dim, fold=shard.fold)


def splits_columns(shard: Shard, rows: int) -> bool:
    """True if `dim` belongs to the columns of a stored matrix with that many rows, False if to its rows."""
    return rows <= prod(split_shape(shard)[: shard.dim])


def element_runs(shard: Shard) -> Iterator[tuple[int, int]]:
    """Yields the held elements as (first element, number of elements) of the whole logical view, in memory order."""
    outer, size, inner = _in_three(shard)
    for row in range(outer):
        for start, stop in shard.held:
            yield (row * size + start) * inner, (stop - start) * inner


def counted_parts(shard: Shard, tensor: torch.Tensor) -> list[torch.Tensor]:
    """The parts of this rank's tensor that no earlier rank holds, without padding rows. Over all ranks, every element
    is counted once."""
    division = shard.division
    if not shard.copies and division is None:
        return [shard.view(tensor)]
    if not shard.copies and division is not None and division.held[1] <= prod(shard.local_shape):
        return [tensor] if tensor.numel() else []  # no padding to leave out
    return _parts(shard, tensor, lambda held: without(held, shard.copies))


def copied_parts(shard: Shard, tensor: torch.Tensor) -> list[torch.Tensor]:
    """The parts of this rank's tensor that an earlier rank holds too. `counted_parts` omits them."""
    if not shard.copies:
        return []
    return _parts(shard, tensor, lambda held: without(held, tuple(without(held, shard.copies))))


def by_range(shard: Shard, tensor: torch.Tensor) -> Iterator[tuple[Range, torch.Tensor]]:
    """Yields each held index range with its elements in this rank's tensor. With ZeRO, the tensor may hold only a part
    of the range. Padding belongs to no range."""
    for offset, held in _with_offsets(shard.held):
        local = offset, offset + held[1] - held[0]
        if shard.division is None:
            yield held, _cut(shard.view(tensor), shard.dim, local)
        else:
            runs = _elements(shard, [local])
            yield held, torch.cat([_in_piece(tensor, shard.division.held, run) for run in runs])


def _parts(shard: Shard, tensor: torch.Tensor, which: Callable[[Range], Iterable[Range]]) -> list[torch.Tensor]:
    chosen = [
        (offset + start - held[0], offset + stop - held[0])
        for offset, held in _with_offsets(shard.held)
        for start, stop in which(held)
    ]
    if shard.division is None:
        return [_cut(shard.view(tensor), shard.dim, part) for part in chosen]
    parts = (_in_piece(tensor, shard.division.held, run) for run in _elements(shard, chosen))
    return [part for part in parts if part.numel()]


def _elements(shard: Shard, parts: Sequence[Range]) -> Iterator[Range]:
    """Converts index ranges of the stored tensor's split dimension to ranges of its elements, in memory order."""
    outer, _, inner = _in_three(shard)
    length = shard.local_shape[shard.dim] if shard.local_shape else 1
    for row in range(outer):
        for start, stop in parts:
            yield (row * length + start) * inner, (row * length + stop) * inner


def _in_three(shard: Shard) -> tuple[int, int, int]:
    """Shape of the whole logical view reshaped to three dimensions, of which the second is split."""
    shape = split_shape(shard)
    return prod(shape[: shard.dim]), split_size(shard), prod(shape[shard.dim + 1 :])


def in_three_dimensions(shard: Shard) -> Shard:
    """The same part, in a logical view reshaped to three dimensions, of which the second is split."""
    return Shard(shard.name, _in_three(shard), 1, shard.held)


def narrowed(shard: Shard, start: int, stop: int) -> Shard:
    """The held part from `start` to `stop` along the split dimension, counted in memory order."""
    kept = [
        (held[0] + max(start - offset, 0), held[0] + min(stop - offset, held[1] - held[0]))
        for offset, held in _with_offsets(shard.held)
    ]
    return replace(shard, ranges=tuple((a, b) for a, b in kept if a < b), copies=())


def pieces(source: Shard, target: Shard) -> Iterator[tuple[Range, Range]]:
    """Yields the intersections of two parts of one parameter along the split dimension: (range in the source's local
    view, range in the target's).

    Copying every pair copies all elements that both parts contain.
    """
    assert (source.name, source.logical_shape) == (target.name, target.logical_shape), f"{source} is not {target}"
    assert source.dim == target.dim or is_whole(source) or is_whole(target), (
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
    """Ranges of the split dimension that are in `wanted` (default: all) and in none of `parts`."""
    assert parts, "no parts given"
    split = next((part for part in parts if not is_whole(part)), parts[0])
    assert all(is_whole(part) or part.dim == split.dim for part in parts), f"{split.name} is split along two dimensions"
    if any(is_whole(part) for part in parts):
        return []
    wanted = along_one_dim(split, wanted or unsplit(split))[1]
    covered = [held for part in parts for held in along_one_dim(part, wanted)[0].held]
    return [gap for held in wanted.held for gap in without(held, covered)]


def _in_piece(tensor: torch.Tensor, piece: Range, run: Range) -> torch.Tensor:
    """Returns the elements of `run` that are in `tensor`, which holds the elements of `piece`."""
    start, stop = common(run, piece)
    return tensor[start - piece[0] : max(stop, start) - piece[0]]


def along_one_dim(source: Shard, target: Shard) -> tuple[Shard, Shard]:
    """Returns both shards with ranges along the same dimension and fold. This is always possible if one shard is the
    whole parameter, which is one range along any dimension."""
    if (source.dim, source.fold) == (target.dim, target.fold):
        return source, target
    if is_whole(source):
        return replace(source, dim=target.dim, fold=target.fold, ranges=None), target
    if is_whole(target):
        return source, replace(target, dim=source.dim, fold=source.fold, ranges=None)
    fold = max(source.fold, target.fold)
    return _folded(source, fold), _folded(target, fold)


def _folded(spec: Shard, fold: int) -> Shard:
    """Returns the same part, with ranges that index `fold` dimensions as one."""
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
