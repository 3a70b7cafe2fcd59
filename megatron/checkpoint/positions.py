"""Byte positions of a step's tensors in its files, and checks of the positions in a manifest of unknown origin.

In each file of a division, one kind of optimizer state is one storage. It contains the rank's parts of the tensors, one
after the other, in the order of the division. The manifest has the storage's first byte, the same in all files, from
which the positions of its tensors are computed.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy

from megatron.checkpoint.manifest import Manifest, Slice, TensorRecord, all_tensors
from megatron.state.division import Division, Members, Range
from megatron.torch_files.torch_file import dtype_named


@dataclass(frozen=True)
class Stretch:
    """All elements of a slice that one file has; they are contiguous."""

    file: str
    elements: Range
    start: int | None
    """First byte in the file. None before schema 4: the file itself then describes where its tensors begin."""


def kind_in_file(kind: str, dtype: object) -> str:
    """Name of the storage for one kind of state and one dtype, in the files of a division."""
    return f"{kind} {dtype}"


def place_in_division(division: Division, key: Sequence[str]) -> tuple[int, int, Sequence[str]]:
    """Sort key of the tensors in a storage."""
    return division.row, division.offset, key


def share_lengths(divisions: Iterable[Division]) -> numpy.ndarray:
    """Number of elements that each rank has of these tensors."""
    total: Any = numpy.zeros(1, numpy.int64)
    for each in divisions:
        ends = numpy.arange(each.group.size + 1) * each.share - each.offset
        total = total + numpy.diff(numpy.clip(ends, 0, each.elements))
    return total


class Positions:
    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._before: dict[tuple[str, str, int], dict[tuple[str, ...], int]] = {}

    def stretches(self, record: TensorRecord, piece: Slice, held: Range | None = None) -> Iterator[Stretch]:
        """Yields the stretches of a slice in order. With `held`, leaves out files that have none of these elements."""
        if not piece.share:
            yield Stretch(piece.file, (0, piece.elements), piece.start)
            return
        shared, division = self._manifest.divisions[piece.file], self._division(piece)
        kind, itemsize = kind_in_file(piece.key[-1], record.dtype), dtype_named(record.dtype).itemsize
        for rank, _ in division.shares(held or (0, piece.elements)):
            first = shared.start(kind, rank)
            if first is not None:
                first += itemsize * self._elements_before(piece.file, kind, rank)[piece.key]
            yield Stretch(shared.files[rank], division.held_by(rank), first)

    def _division(self, piece: Slice) -> Division:
        ranks = len(self._manifest.divisions[piece.file].files)
        return Division(Members(piece.file, 0, ranks), piece.elements, piece.share, piece.offset, piece.row)

    @cached_property
    def _divided(self) -> dict[tuple[str, str], list[tuple[tuple[str, ...], Division]]]:
        """Maps (division, kind) to the (key, division) of its tensors, in their order in the storage."""
        found = defaultdict(list)
        for _, record in all_tensors(self._manifest):
            for piece in record.slices:
                if piece.share:
                    kind = kind_in_file(piece.key[-1], record.dtype)
                    found[piece.file, kind].append((piece.key, self._division(piece)))
        return {
            of: sorted(tensors, key=lambda tensor: place_in_division(tensor[1], tensor[0]))
            for of, tensors in found.items()
        }

    def _elements_before(self, name: str, kind: str, rank: int) -> dict[tuple[str, ...], int]:
        """Number of elements before each tensor in a rank's storage, by key."""
        if (name, kind, rank) not in self._before:
            before, total = {}, 0
            for key, division in self._divided[name, kind]:
                before[key] = total
                start, stop = division.held_by(rank)
                total += stop - start
            self._before[name, kind, rank] = before
        return self._before[name, kind, rank]

    def check(self) -> None:
        """Raises a ValueError if a tensor begins between two elements, overlaps another tensor or ends after its
        file."""
        used: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for name, record in all_tensors(self._manifest):
            itemsize = dtype_named(record.dtype).itemsize
            for piece in record.slices:
                if not piece.share and piece.start is not None:
                    _check_aligned(name, piece.start, itemsize)
                    used[piece.file].append((piece.start, piece.start + itemsize * piece.elements, name))
        for (name, kind), tensors in self._divided.items():
            shared = self._manifest.divisions[name]
            lengths = share_lengths(division for _, division in tensors)
            if not (shared.starts or shared.first) or not lengths.any():
                continue  # of an earlier schema, or without elements
            itemsize = dtype_named(kind.rpartition(" ")[2]).itemsize
            _check_rows(kind, [division for _, division in tensors])
            for rank, (file, length) in enumerate(zip(shared.files, lengths.tolist(), strict=True)):
                start = shared.start(kind, rank)
                if length and start is None:
                    raise ValueError(f"{kind} of {name[:60]} has no first byte for {file[:100]}")
                if length and start is not None:
                    _check_aligned(kind, start, itemsize)
                    used[file].append((start, start + itemsize * length, kind))
        for file, parts in used.items():
            self._check_apart(file, sorted(part for part in parts if part[0] < part[1]))

    def _check_apart(self, file: str, parts: Sequence[tuple[int, int, str]]) -> None:
        for (_, stop, name), (start, _, other) in pairwise(parts):
            if start < stop:
                raise ValueError(f"{other[:100]} begins in {file[:100]} at byte {start}, within {name[:100]}")
        size = self._manifest.files[file].size
        if parts and parts[-1][1] > size:
            raise ValueError(
                f"{parts[-1][2][:100]} ends at byte {parts[-1][1]} of {file[:100]}, which has {size} bytes"
            )


def _check_aligned(name: str, start: int, itemsize: int) -> None:
    if start < 0 or start % itemsize:
        raise ValueError(f"{name[:100]} begins at byte {start}, between two elements of {itemsize} bytes")


def _check_rows(kind: str, divisions: Sequence[Division]) -> None:
    """Raises unless the tensors of a row have equal shares and do not overlap."""
    for one, other in pairwise(divisions):
        if one.row == other.row and (one.share != other.share or other.offset < one.offset + one.elements):
            raise ValueError(
                f"two tensors of {kind} in row {one.row} of their division overlap or have different shares"
            )
