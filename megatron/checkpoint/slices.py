"""From stored slices to any other split of the same logical tensor.

A slice is a list of index ranges along one dimension of the logical view; to load is to copy where ranges overlap, and
to have copied every index. Who held what when it was saved does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod

import torch
from torch import Tensor

from megatron.checkpoint.manifest import Slice, TensorRecord
from megatron.distributed.shard import ShardSpec
from megatron.errors import CheckpointError

Ranges = tuple[tuple[int, int], ...]


def local_logical_shape(logical_shape: tuple[int, ...], dim: int, ranges: Ranges | None) -> tuple[int, ...]:
    if ranges is None or not logical_shape:
        return logical_shape
    held = sum(stop - start for start, stop in ranges)
    return (*logical_shape[:dim], held, *logical_shape[dim + 1 :])


def logical_view(stored: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The stored tensor as its logical local view; a vocabulary's padding rows are cut."""
    if stored.numel() != prod(shape):
        stored = stored[: shape[0]]
    return stored.view(shape)


def covers_all(record: TensorRecord) -> bool:
    """Every index of the split dimension is in a slice, none out of range, and copies are whole copies."""
    if not record.logical_shape:
        return bool(record.slices)
    length = record.logical_shape[record.dim]
    whole = ((0, length),)
    pieces = sorted({interval for piece in record.slices for interval in piece.ranges or whole})
    position = 0
    for start, stop in pieces:
        if start != position or stop <= start:
            return False
        position = stop
    return position == length


def whole_stored_shape(record: TensorRecord) -> tuple[int, ...]:
    """How the unsplit tensor is stored, without padding. A slice shows which dimensions its columns join."""
    logical, piece = record.logical_shape, record.slices[0]
    if len(piece.shape) == len(logical):
        return logical
    if len(piece.shape) == 1:
        return (prod(logical),)
    local = local_logical_shape(logical, record.dim, piece.ranges)
    for first_column in range(1, len(logical)):
        if prod(local[first_column:]) == piece.shape[1]:
            return (prod(logical[:first_column]), prod(logical[first_column:]))
    raise AssertionError(f"a tensor of logical shape {logical} is stored as {piece.shape}")


def fill(
    spec: ShardSpec, target: Tensor, record: TensorRecord, read: Callable[[Slice], Tensor], *, cast: bool = False
) -> None:
    """Copy into `target` (stored local shape) what `spec` holds of the logical tensor that `record` describes."""
    check_compatible(spec, target.dtype, record, cast=cast)
    if _copy_whole(spec, target, record, read):
        return
    view = logical_view(target, local_logical_shape(spec.logical_shape, spec.dim, spec.ranges))
    if target.numel() != view.numel():
        target[view.shape[0] :].zero_()  # padding rows of a vocabulary
    dim = record.dim if spec.ranges is None else spec.dim
    wanted = spec.ranges if spec.ranges is not None else ((0, spec.logical_shape[dim]),)
    missing = list(wanted)
    for piece in _distinct(record.slices):
        missing = _copy_piece(view, wanted, dim, record.logical_shape, piece, read, missing)
    if missing:
        raise CheckpointError(f"{spec.name}: indices {missing} of dimension {dim} are in no file")


def _copy_whole(spec: ShardSpec, target: Tensor, record: TensorRecord, read: Callable[[Slice], Tensor]) -> bool:
    """The same split as when it was saved: equal to the last padding row."""
    for piece in record.slices:
        if piece.ranges == spec.ranges and piece.shape == tuple(target.shape):
            target.copy_(read(piece))
            return True
    return False


def _distinct(slices: Iterable[Slice]) -> list[Slice]:
    """One of each group of copies."""
    first: dict[Ranges | None, Slice] = {}
    for piece in slices:
        first.setdefault(piece.ranges, piece)
    return list(first.values())


def _copy_piece(
    view: Tensor,
    wanted: Ranges,
    dim: int,
    logical_shape: tuple[int, ...],
    piece: Slice,
    read: Callable[[Slice], Tensor],
    missing: list[tuple[int, int]],
) -> list[tuple[int, int]]:
    """Copy the overlap of one stored piece with what is still missing; returns what is missing afterwards."""
    held = piece.ranges if piece.ranges is not None else ((0, logical_shape[dim]),)
    overlaps = [(max(a, low), min(b, high)) for a, b in missing for low, high in held if max(a, low) < min(b, high)]
    if not overlaps:
        return missing
    source = logical_view(read(piece), local_logical_shape(logical_shape, dim, piece.ranges))
    for start, stop in overlaps:
        part = source.narrow(dim, position(held, start), stop - start)
        view.narrow(dim, position(wanted, start), stop - start).copy_(part)
        missing = [rest for interval in missing for rest in _without(interval, (start, stop))]
    return missing


def position(ranges: Ranges, index: int) -> int:
    """Where a global index lies in the concatenation of the ranges held."""
    offset = 0
    for start, stop in ranges:
        if start <= index < stop:
            return offset + index - start
        offset += stop - start
    raise AssertionError(f"index {index} is in none of {ranges}")


def _without(interval: tuple[int, int], cut: tuple[int, int]) -> list[tuple[int, int]]:
    """What is left of an interval when another is cut out of it."""
    start, stop = interval
    if cut[1] <= start or stop <= cut[0]:
        return [interval]
    pieces = [(start, cut[0]), (cut[1], stop)]
    return [(a, b) for a, b in pieces if a < b]


def check_compatible(spec: ShardSpec, dtype: torch.dtype, record: TensorRecord, *, cast: bool) -> None:
    if spec.logical_shape != record.logical_shape:
        raise CheckpointError(
            f"{spec.name}: the model has shape {spec.logical_shape}, the checkpoint {record.logical_shape}"
        )
    split = spec.ranges is not None or any(piece.ranges is not None for piece in record.slices)
    if split and spec.ranges is not None and any(p.ranges is not None for p in record.slices):
        assert spec.dim == record.dim, f"{spec.name}: split along {record.dim} when saved, along {spec.dim} now"
    if not cast and str(dtype) != record.dtype:
        raise CheckpointError(
            f"{spec.name}: the model holds {dtype}, the checkpoint {record.dtype}; "
            "resume with the precision it was trained in, or take its weights alone with --finetune"
        )
