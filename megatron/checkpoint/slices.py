"""Resharding: fills any split of a logical tensor from its stored slices.

A Shard describes each stored slice. A load copies the intersections of the stored Shards with the wanted one, whatever
layout saved them, and raises if no stored slice has a wanted index.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from megatron.checkpoint import paths
from megatron.checkpoint.manifest import Slice, TensorRecord
from megatron.errors import CheckpointError
from megatron.state.division import Range
from megatron.state.shard import (
    Shard,
    along_one_dim,
    copy_common,
    in_three_dimensions,
    is_whole,
    missing_ranges,
    narrowed,
    pieces,
    split_shape,
    split_size,
)

Read = Callable[[Slice], Tensor]
ReadElements = Callable[[Slice, Range], Tensor]
"""Reads consecutive elements of a slice, in one dimension."""


def source_spec(name: str, record: TensorRecord, piece: Slice) -> Shard:
    return replace(whole_spec(name, record), ranges=piece.ranges)


def whole_spec(name: str, record: TensorRecord) -> Shard:
    return Shard(name=name, logical_shape=record.logical_shape, dim=record.dim, fold=record.fold)


def covers_exactly(record: TensorRecord) -> bool:
    """True if the slices cover the split dimension without gaps. Slices of equal ranges are replicas; others may not
    overlap."""
    dims = len(record.logical_shape)
    if not record.slices or (dims and not 0 <= record.dim <= record.dim + record.fold - 1 < dims):
        return False
    size = split_size(whole_spec("", record))
    whole = ((0, size),)
    held = {interval for piece in record.slices for interval in (whole if piece.ranges is None else piece.ranges)}
    if any(piece.ranges is not None and len(set(piece.ranges)) < len(piece.ranges) for piece in record.slices):
        return False
    position = 0
    for start, stop in sorted(held):
        if start == stop <= size:
            continue  # a rank that holds nothing but padding rows of a vocabulary
        if start != position or stop <= start:
            return False
        position = stop
    return position == size


def whole_stored_shape(record: TensorRecord) -> tuple[int, ...]:
    """Stored shape of the unsplit tensor, without padding. The slices' shape shows which dimensions are flattened."""
    logical, piece = record.logical_shape, record.slices[0]
    if len(piece.shape) == len(logical):
        return logical
    if len(piece.shape) == 1:
        return (prod(logical),)
    spec = source_spec("", record, piece)
    local, joined = spec.local_shape, split_shape(spec)
    for first_column in range(1, len(joined)):
        if prod(local[first_column:]) == piece.shape[1]:
            return (prod(joined[:first_column]), prod(joined[first_column:]))
    raise _contradiction(record, piece)


def check_is_whole(name: str, record: TensorRecord) -> None:
    """Raises unless a tensor is stored whole, in its logical shape. For optimizer state of another shape than its
    parameter's."""
    for piece in record.slices:
        if piece.shape != record.logical_shape or not is_whole(source_spec(name, record, piece)):
            raise CheckpointError(f"{name}: {_contradiction(record, piece)}")


def _contradiction(record: TensorRecord, piece: Slice) -> CheckpointError:
    return CheckpointError(
        f"{paths.MANIFEST}: a tensor of shape {record.logical_shape} cannot be stored as {piece.shape} in "
        f"{piece.file}; the manifest was changed after it was written: use another checkpoint"
    )


def fill(spec: Shard, target: Tensor, record: TensorRecord, read: Read, *, cast: bool = False) -> None:
    """Fills `target`, in its stored local shape, with the part of the logical tensor that `spec` describes."""
    check_compatible(spec, target.dtype, record, cast=cast)
    same = same_slice(spec, target.shape, record)
    if same is not None:
        target.copy_(read(same))
        return
    sources = _sources(spec, record)
    if target.numel() != prod(spec.local_shape):
        target[spec.local_shape[0] :].zero_()  # padding rows of a vocabulary
    for source, piece in sources:
        if any(True for _ in pieces(source, spec)):
            copy_common(source, read(piece), spec, target)


def same_slice(spec: Shard, shape: Sequence[int], record: TensorRecord) -> Slice | None:
    """Returns a slice that was saved with the same split, in the same shape, including its padding rows."""
    return next((p for p in record.slices if p.ranges == spec.ranges and p.shape == tuple(shape)), None)


def wanted_slices(spec: Shard, shape: Sequence[int], record: TensorRecord) -> list[Slice]:
    """The slices that hold a part of what a rank stores in `shape`."""
    if (same := same_slice(spec, shape, record)) is not None:
        return [same]
    return [piece for source, piece in _sources(spec, record) if any(True for _ in pieces(source, spec))]


def _sources(spec: Shard, record: TensorRecord) -> list[tuple[Shard, Slice]]:
    """Returns the slices, one of each set of replicas. Raises if none of them has an index that `spec` needs."""
    first: dict[tuple[Range, ...] | None, Slice] = {}
    for piece in record.slices:
        first.setdefault(piece.ranges, piece)
    sources = [(source_spec(spec.name, record, piece), piece) for piece in first.values()]
    if missing := missing_ranges([source for source, _ in sources], spec):
        raise CheckpointError(
            f"{spec.name}: indices {missing} of dimension {record.dim} are in no file; use another checkpoint"
        )
    return sources


def read_elements(
    spec: Shard, shape: Sequence[int], dtype: torch.dtype, held: Range, record: TensorRecord, read: ReadElements
) -> Tensor:
    """Returns the elements `held` of the tensor that a rank stores in `shape`, in one dimension. From each saved slice
    only the span from the first to the last wanted element is read."""
    check_compatible(spec, dtype, record, cast=False)
    if (same := same_slice(spec, shape, record)) is not None:
        return read(same, held)
    found = torch.zeros(held[1] - held[0], dtype=dtype)  # padding rows of a vocabulary stay zero
    held = held[0], min(held[1], prod(spec.local_shape))
    if held[0] >= held[1]:
        return found
    sources = _sources(spec, record)
    split = next((source for source, _ in sources if not is_whole(source)), sources[0][0])
    wanted, window, base = _window(in_three_dimensions(along_one_dim(split, spec)[1]), held)
    buffer = torch.zeros(wanted.local_shape, dtype=dtype)
    for source, piece in sources:
        three = in_three_dimensions(along_one_dim(source, along_one_dim(split, spec)[1])[0])
        part, elements = _needed(three, wanted, window)
        if part is not None:
            copy_common(part, read(piece, elements), wanted, buffer)
    found[: held[1] - held[0]] = buffer.view(-1)[held[0] - base : held[1] - base]
    return found


def _window(three: Shard, held: Range) -> tuple[Shard, Range, int]:
    """The smallest part of a three-dimensional tensor that contains the elements `held`: a range of its split dimension
    if its first dimension is 1, else of its rows. Returns the part, its rows, and the number of elements before it."""
    outer, length, inner = three.local_shape
    if outer == 1:
        start, stop = held[0] // inner, -(-held[1] // inner)
        return narrowed(three, start, stop), (0, 1), start * inner
    start, stop = held[0] // (length * inner), -(-held[1] // (length * inner))
    return _rows(three, (start, stop)), (start, stop), start * length * inner


def _needed(source: Shard, wanted: Shard, rows: Range) -> tuple[Shard | None, Range]:
    """Returns the part of a saved three-dimensional slice that overlaps `wanted`, and the range of the slice's elements
    that contains this part; (None, (0, 0)) if they do not overlap."""
    outer, length, inner = source.local_shape
    part = _rows(source, rows)
    here = [indices for indices, _ in pieces(part, wanted)]
    if not here:
        return None, (0, 0)
    if outer > 1:
        return part, (rows[0] * length * inner, rows[1] * length * inner)
    start, stop = min(a for a, _ in here), max(b for _, b in here)
    return narrowed(part, start, stop), (start * inner, stop * inner)


def _rows(three: Shard, rows: Range) -> Shard:
    return replace(three, logical_shape=(rows[1] - rows[0], *three.logical_shape[1:]), copies=())


def check_compatible(spec: Shard, dtype: torch.dtype, record: TensorRecord, *, cast: bool) -> None:
    if tuple(spec.logical_shape) != record.logical_shape:
        raise CheckpointError(
            f"{spec.name}: the model has shape {spec.logical_shape}, the checkpoint {record.logical_shape}; "
            "give the settings of the saved model"
        )
    if not cast and str(dtype) != record.dtype:
        raise CheckpointError(
            f"{spec.name}: the model holds {dtype}, the checkpoint {record.dtype}; "
            "resume with the checkpoint's precision, or load only its weights with --finetune"
        )
