"""Resharding: fills any split of a logical tensor from its stored slices.

Each stored slice is described by a ShardSpec. Loading copies the intersections of the stored ShardSpecs with the wanted
one, whatever layout saved them, and fails if an index is in none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from megatron.checkpoint.manifest import Slice, TensorRecord
from megatron.distributed.shard import ShardSpec, copy_common, missing_ranges, pieces
from megatron.errors import CheckpointError

Read = Callable[[Slice], Tensor]


def source_spec(name: str, record: TensorRecord, piece: Slice) -> ShardSpec:
    return replace(whole_spec(name, record), ranges=piece.ranges)


def whole_spec(name: str, record: TensorRecord) -> ShardSpec:
    return ShardSpec(name=name, logical_shape=record.logical_shape, dim=record.dim, fold=record.fold)


def covers_exactly(record: TensorRecord) -> bool:
    """Whether the slices cover the split dimension without gaps; slices of equal ranges are replicas, no others
    overlap."""
    dims = len(record.logical_shape)
    if not record.slices or (dims and not 0 <= record.dim <= record.dim + record.fold - 1 < dims):
        return False
    size = whole_spec("", record).size
    whole = ((0, size),)
    held = {interval for piece in record.slices for interval in (whole if piece.ranges is None else piece.ranges)}
    position = 0
    for start, stop in sorted(held):
        if start == stop <= size:
            continue  # a rank that holds nothing but padding rows of a vocabulary
        if start != position or stop <= start:
            return False
        position = stop
    return position == size


def whole_stored_shape(record: TensorRecord) -> tuple[int, ...]:
    """The stored shape of the unsplit tensor, without padding. Which dimensions are joined follows from a slice's
    shape."""
    logical, piece = record.logical_shape, record.slices[0]
    if len(piece.shape) == len(logical):
        return logical
    if len(piece.shape) == 1:
        return (prod(logical),)
    spec = source_spec("", record, piece)
    local, joined = spec.local_shape, spec.split_shape
    for first_column in range(1, len(joined)):
        if prod(local[first_column:]) == piece.shape[1]:
            return (prod(joined[:first_column]), prod(joined[first_column:]))
    raise AssertionError(f"a tensor of logical shape {logical} is stored as {piece.shape}")


def fill(spec: ShardSpec, target: Tensor, record: TensorRecord, read: Read, *, cast: bool = False) -> None:
    """Fills `target`, in its stored local shape, with the part of the logical tensor that `spec` describes."""
    check_compatible(spec, target.dtype, record, cast=cast)
    if _copy_same(spec, target, record, read):
        return
    sources = [(source_spec(spec.name, record, piece), piece) for piece in _distinct(record.slices)]
    if missing := missing_ranges([source for source, _ in sources], spec):
        raise CheckpointError(f"{spec.name}: indices {missing} of dimension {record.dim} are in no file")
    if target.numel() != prod(spec.local_shape):
        target[spec.local_shape[0] :].zero_()  # padding rows of a vocabulary
    for source, piece in sources:
        if any(True for _ in pieces(source, spec)):
            copy_common(source, read(piece), spec, target)


def _copy_same(spec: ShardSpec, target: Tensor, record: TensorRecord, read: Read) -> bool:
    """Copies a slice that was saved with the same split, including its padding rows."""
    for piece in record.slices:
        if piece.ranges == spec.ranges and piece.shape == tuple(target.shape):
            target.copy_(read(piece))
            return True
    return False


def _distinct(slices: Iterable[Slice]) -> list[Slice]:
    """The slices without replicas."""
    first: dict[tuple[tuple[int, int], ...] | None, Slice] = {}
    for piece in slices:
        first.setdefault(piece.ranges, piece)
    return list(first.values())


def check_compatible(spec: ShardSpec, dtype: torch.dtype, record: TensorRecord, *, cast: bool) -> None:
    if tuple(spec.logical_shape) != record.logical_shape:
        raise CheckpointError(
            f"{spec.name}: the model has shape {spec.logical_shape}, the checkpoint {record.logical_shape}"
        )
    if not cast and str(dtype) != record.dtype:
        raise CheckpointError(
            f"{spec.name}: the model holds {dtype}, the checkpoint {record.dtype}; "
            "resume with the precision it was trained in, or take its weights alone with --finetune"
        )
