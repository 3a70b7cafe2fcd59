"""Tensors whose memory is like what a file stores: their bytes are read into them while they are hashed, so that a load
reads a file once. All others are read from the verified file, as ever.

Files are opened here before they are verified. What a damaged one says can do no more than put wrong bytes into a
tensor that is about to be overwritten; the hash of all bytes then refuses the step before anything is made of it.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint import classic, paths
from megatron.checkpoint.manifest import Manifest, Slice, TensorRecord
from megatron.checkpoint.mapped_bytes import NotedReads
from megatron.checkpoint.reader import StepReader
from megatron.checkpoint.state import Held, Sharded
from megatron.checkpoint.storage import Plan
from megatron.checkpoint.torch_files import TorchFile
from megatron.checkpoint.verify import description_problem
from megatron.state.division import Range, common
from megatron.state.shard import Shard

Own = Mapping[str, Mapping[str, Tensor]]
"""The optimizer's own tensors that may be read into, by parameter and kind."""


class PlacedReader(StepReader):
    """Of a verified step, some of whose tensors have been read already: these very tensors, whatever else has the name
    of their parameter. `parsed`: files whose description was hashed as it was read, and need not be read again."""

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        weights: Mapping[str, Tensor],
        own: Own,
        parsed: Mapping[str, TorchFile],
    ) -> None:
        super().__init__(directory, manifest)
        self._weights, self._own, self._parsed = weights, own, parsed

    def fill(self, spec: Shard, target: Tensor, record: TensorRecord, *, cast: bool = False) -> None:
        if target is not self._weights.get(spec.name):
            super().fill(spec, target, record, cast=cast)

    def ready(self, name: str, kind: str) -> Tensor | None:
        return self._own.get(name, {}).get(kind)

    def value(self, name: str, *key: str) -> Any:
        """Of a parsed file only what is asked for is made."""
        if name in self._parsed and name not in self._files:
            try:
                return self._parsed[name].value(classic.lookup(self._parsed[name].content, key))
            except LookupError:
                pass  # then for torch's own loader
        return super().value(name, *key)


class _Taken:
    """Intervals that do not overlap."""

    def __init__(self) -> None:
        self._ends: list[int] = []  # the starts and stops of all, in order

    def is_free(self, start: int, stop: int) -> bool:
        at = bisect(self._ends, start)
        return at % 2 == 0 and (at == len(self._ends) or self._ends[at] >= stop)

    def add(self, start: int, stop: int) -> None:
        at = bisect(self._ends, start)
        self._ends[at:at] = [start, stop]


class Placing:
    """Finds the places. `plans`, by file: them, and what was read of the file to find them."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory, self._manifest = directory, manifest
        self._files: dict[str, tuple[TorchFile, NotedReads] | None] = {}
        self._open: NotedReads | None = None
        self._memory = _Taken()
        self._bytes: dict[str, _Taken] = {}
        self._places: dict[str, list[tuple[int, memoryview]]] = {}

    def close(self) -> None:
        if self._open is not None:
            self._open.close()

    @property
    def plans(self) -> dict[str, Plan]:
        return {
            name: Plan(sorted(self._places.get(name, ()), key=lambda place: place[0]), found[1].seen())
            for name, found in self._files.items()
            if found is not None
        }

    def reader(self, params: Mapping[str, Sharded], own: Own, held: Held | None) -> PlacedReader:
        """Finds places in the parameters and in the optimizer's own tensors; the reader takes it that they are full."""
        model, optimizer = self._manifest.model, self._manifest.optimizer
        weights = {
            name: param for name, (spec, param) in params.items() if self._place(spec, param.shape, param, model[name])
        }
        ready: dict[str, dict[str, Tensor]] = {}
        for name, (spec, param) in params.items():
            mine = None if held is None or name not in own else held(name)
            for kind, tensor in own.get(name, {}).items():
                record = optimizer.get(name, {}).get(kind)
                if record is not None and self._place(spec, param.shape, tensor, record, mine):
                    ready.setdefault(name, {})[kind] = tensor
        parsed = {name: found[0] for name, found in self._files.items() if found is not None and found[0].is_plain}
        return PlacedReader(self._directory, self._manifest, weights, ready, parsed)

    def _place(
        self, spec: Shard, shape: torch.Size, target: Tensor, record: TensorRecord, held: Range | None = None
    ) -> bool:
        """Whether all of `target` has places: it is what a rank stores in `shape`, or the elements `held` of it."""
        wanted = held or (0, shape.numel())
        if not _is_plain(target, wanted[1] - wanted[0]) or str(target.dtype) != record.dtype:
            return False
        if tuple(spec.logical_shape) != record.logical_shape:
            return False
        same = [piece for piece in record.slices if piece.ranges == spec.ranges and piece.shape == tuple(shape)]
        start = target.data_ptr()
        if not same or not self._memory.is_free(start, start + target.nbytes):
            return False
        memory = target.detach().view(-1).view(torch.uint8).numpy().data
        found = self._found(same[0], record, memory, wanted)
        if found is None:
            return False
        self._memory.add(start, start + target.nbytes)
        for file, first, part in found:
            self._bytes[file].add(first, first + len(part))
            self._places.setdefault(file, []).append((first, part))
        return True

    def _found(
        self, piece: Slice, record: TensorRecord, memory: memoryview, wanted: Range
    ) -> list[tuple[str, int, memoryview]] | None:
        """(file, its first byte, the memory for it and those after it)"""
        found, element = [], len(memory) // (wanted[1] - wanted[0])
        for name, stored in self._manifest.places(piece, wanted):
            file = self.file(name)
            first = None if file is None else _first_byte(file, record, piece, stored)
            if first is None:
                return None
            low, high = common(wanted, stored)
            first += (low - stored[0]) * element
            part = memory[(low - wanted[0]) * element : (high - wanted[0]) * element]
            if not self._bytes.setdefault(name, _Taken()).is_free(first, first + len(part)):
                return None  # tensors that share their bytes
            found.append((name, first, part))
        return found if sum(len(part) for _, _, part in found) == len(memory) else None

    def file(self, name: str) -> TorchFile | None:
        """None: it is damaged, or of a kind that another reader refuses once its bytes are verified."""
        if name not in self._files:
            self.close()  # one at a time: there may be more files than a process may have open
            self._files[name] = None
            try:
                path = paths.member(self._directory, name)
                self._open = reads = NotedReads(path)
                self._files[name] = TorchFile.open(path, None, reads), reads
            except Exception:  # of whatever kind: the hash tells what is damaged, and the other reader what it refuses
                pass
        found = self._files[name]
        return None if found is None else found[0]


def _is_plain(target: Tensor, elements: int) -> bool:
    return (
        target.device.type == "cpu"
        and type(target) in (Tensor, torch.nn.Parameter)
        and target.layout == torch.strided
        and target.is_contiguous()
        and target.numel() == elements > 0
    )


def _first_byte(file: TorchFile, record: TensorRecord, piece: Slice, stored: Range) -> int | None:
    try:
        place = file.place(classic.lookup(file.content, piece.key))
    except Exception:  # as above
        return None
    if place is None:
        return None
    first, dtype, shape = place
    return None if description_problem(record, piece, dtype, shape, stored) else first
