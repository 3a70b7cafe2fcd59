"""Reads the tensors and the plain values of a step. Each tensor's position is computed from the manifest, so
tensors are not unpickled. `safe_load` reads steps from before schema 4 and the `extra` of a user's script."""

from bisect import bisect
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint import classic, paths, slices
from megatron.checkpoint.all_ranks import run_on_all, share
from megatron.checkpoint.besides_tensors import read_values, values_file
from megatron.checkpoint.manifest import Manifest, Slice, TensorRecord
from megatron.checkpoint.positions import Positions, Stretch
from megatron.checkpoint.run_state import Held, Sharded
from megatron.checkpoint.verify import DamagedCheckpointError, identity, stored_problem, verify_share
from megatron.distributed.parallel_state import Axis
from megatron.errors import CheckpointError
from megatron.state.division import Range, common
from megatron.state.shard import Shard
from megatron.torch_files import safe_load
from megatron.torch_files.mapped_bytes import Bytes
from megatron.torch_files.torch_file import dtype_named

Own = Mapping[str, Mapping[str, Tensor]]
"""Optimizer tensors, by parameter and kind."""


class StepReader:
    """Reader of one step. Maps each file when it is first needed, so only the bytes that are copied are read."""

    weights: Mapping[str, Tensor] = MappingProxyType({})
    own: Own = MappingProxyType({})
    """Optimizer tensors that already hold the step's values. `weights` are the parameters that already do; `fill` skips
    them."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest
        self._files: dict[str, Any] = {}
        self._bytes: dict[str, Bytes] = {}
        self._values: dict[str, dict[str, Any]] = {}

    @cached_property
    def _positions(self) -> Positions:
        return Positions(self.manifest)

    def file(self, name: str) -> Any:
        """The content of a `.pt` file, unpickled."""
        if name not in self._files:
            self._files[name] = safe_load.load_file(paths.member(self.directory, name))
        return self._files[name]

    def value(self, name: str, *key: str) -> Any:
        """Returns the plain value at a path of keys in a file, or None."""
        beside = values_file(name)
        if beside in self.manifest.files:
            if beside not in self._values:
                self._values[beside] = read_values(paths.member(self.directory, beside))
            if key[0] in self._values[beside]:
                return classic.lookup(self._values[beside], key)
        return classic.lookup(self.file(name), key)

    def elements(self, spec: Shard, record: TensorRecord, piece: Slice, held: Range) -> Tensor:
        """Returns consecutive elements of a slice, in one dimension. Opens only the files that have them."""
        parts = []
        for stretch in self._positions.stretches(record, piece, held):
            found, first = self._stored(spec, record, piece, stretch), stretch.elements[0]
            low, high = common(held, stretch.elements)
            parts.append(found[low - first : high - first])
        if not parts:
            return torch.empty(0, dtype=dtype_named(record.dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _stored(self, spec: Shard, record: TensorRecord, piece: Slice, stretch: Stretch) -> Tensor:
        """Returns a file's elements of a slice, in one dimension."""
        if stretch.start is None:
            found = classic.lookup(self.file(stretch.file), piece.key)
            if problem := stored_problem(record, piece, found, stretch.elements):
                raise DamagedCheckpointError(f"{self.directory / stretch.file}: {spec.name} {problem}")
            return found.view(-1)
        if stretch.file not in self._bytes:
            self._bytes[stretch.file] = Bytes.of_file(paths.member(self.directory, stretch.file))
        dtype, (first, stop) = dtype_named(record.dtype), stretch.elements
        return self._bytes[stretch.file].part(stretch.start, (stop - first) * dtype.itemsize).tensor(dtype)

    def fill(self, spec: Shard, target: Tensor, record: TensorRecord, *, cast: bool = False) -> None:
        def read(piece: Slice) -> Tensor:
            return self.elements(spec, record, piece, (0, piece.elements)).view(piece.shape)

        if target is not self.weights.get(spec.name):
            slices.fill(spec, target, record, read, cast=cast)

    def mapped(self, spec: Shard, like: Tensor, record: TensorRecord, *, cast: bool) -> Tensor | None:
        """Maps the tensor from its file without reading it. Returns None unless one file has it in the shape of
        `like`."""
        piece = slices.same_slice(spec, like.shape, record)
        if piece is None or piece.share:
            return None
        slices.check_compatible(spec, like.dtype, record, cast=cast)
        return self.elements(spec, record, piece, (0, piece.elements)).view(piece.shape)

    def logical(self, name: str, record: TensorRecord) -> Tensor:
        """A whole tensor in its stored shape, without padding rows."""
        spec = slices.whole_spec(name, record)
        full = torch.empty(slices.whole_stored_shape(record), dtype=dtype_named(record.dtype))
        self.fill(spec, full, record)
        return full

    def model_dtype(self) -> torch.dtype:
        """Dtype of the saved parameters."""
        return dtype_named(next(iter(self.manifest.model.values())).dtype)

    def optimizer_like(
        self, name: str, spec: Shard, stored_shape: torch.Size, held: Range | None = None
    ) -> dict[str, Tensor]:
        """Returns the optimizer's tensors of one parameter: in its local shape, or the elements `held` in one
        dimension. Those with another logical shape (the row and column means of Adafactor) are whole. Tensors that are
        stored in the wanted form are mapped, not copied."""
        found = {}
        for kind, record in self.manifest.optimizer.get(name, {}).items():
            if (ready := self.own.get(name, {}).get(kind)) is not None:
                found[kind] = ready
                continue
            if record.logical_shape != tuple(spec.logical_shape):
                slices.check_is_whole(f"{kind} of {name}", record)
                found[kind] = self.logical(name, record)
                continue
            wanted, read = held or (0, stored_shape.numel()), partial(self.elements, spec, record)
            tensor = slices.read_elements(spec, stored_shape, dtype_named(record.dtype), wanted, record, read)
            found[kind] = tensor.view(stored_shape) if held is None else tensor
        return found

    def main_file(self) -> Any:
        return self.file(self.main_name())

    def main_value(self, *key: str) -> Any:
        return self.value(self.main_name(), *key)

    def main_name(self) -> str:
        """The first rank's file, which holds everything that is not split."""
        names = sorted(name for name in self.manifest.files if name.endswith(paths.MODEL_FILE))
        if not names:
            raise CheckpointError(f"{self.directory} holds no {paths.MODEL_FILE}; copy the whole step again")
        return names[0]

    # ---------------------------------------------------------------- which files a rank reads

    def files_of_values(self, *names: str) -> set[str]:
        """Returns the files from which the plain values of the files `names` are read."""
        return {beside if (beside := values_file(name)) in self.manifest.files else name for name in names}

    def files_of(self, spec: Shard, shape: torch.Size, record: TensorRecord, held: Range | None = None) -> set[str]:
        """The files with the tensor that a rank stores in `shape`, or with the elements `held` of it."""
        if record.logical_shape != tuple(spec.logical_shape):
            spec, held = slices.whole_spec(spec.name, record), None
        if slices.same_slice(spec, shape, record) is None:
            held = None
        pieces = slices.wanted_slices(spec, shape, record)
        return {each.file for piece in pieces for each in self._positions.stretches(record, piece, held)}


# ---------------------------------------------------------------- reading while hashing


def read_and_verify(
    directory: Path, manifest: Manifest, params: Mapping[str, Sharded], own: Own, held: Held | None, world: Axis
) -> StepReader:
    """Verifies the checksums of this rank's share of a step. A tensor of `params` or `own` that has the layout of the
    files is read directly into its memory in the same pass. If one rank finds damage, all ranks raise."""
    reader, places = StepReader(directory, manifest), _Places(manifest)

    def place() -> None:
        reader.weights, reader.own = places.of_weights(params), places.of_state(params, own, held)

    run_on_all(place, world)
    into = {name: sorted(found, key=lambda place: place[0]) for name, found in places.by_file.items()}
    number, count = share(partial(identity, directory, manifest), world)
    run_on_all(partial(verify_share, directory, manifest, number, count, into), world)
    return reader


class _Places:
    """Memory into which bytes of files are read without conversion."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest, self._positions = manifest, Positions(manifest)
        self._taken: list[int] = []  # start and end addresses of reserved memory, sorted
        self.by_file: dict[str, list[tuple[int, memoryview]]] = {}

    def of_weights(self, params: Mapping[str, Sharded]) -> dict[str, Tensor]:
        model = self._manifest.model
        return {n: param for n, (spec, param) in params.items() if self._has(spec, param.shape, param, model[n])}

    def of_state(self, params: Mapping[str, Sharded], own: Own, held: Held | None) -> dict[str, dict[str, Tensor]]:
        found: dict[str, dict[str, Tensor]] = {}
        for name, (spec, param) in params.items():
            mine = None if held is None or name not in own else held(name)
            for kind, tensor in own.get(name, {}).items():
                record = self._manifest.optimizer.get(name, {}).get(kind)
                if record is not None and self._has(spec, param.shape, tensor, record, mine):
                    found.setdefault(name, {})[kind] = tensor
        return found

    def _has(
        self, spec: Shard, shape: torch.Size, target: Tensor, record: TensorRecord, held: Range | None = None
    ) -> bool:
        """Registers places for all of `target`, the tensor that a rank stores in `shape` or the elements `held` of it.
        Returns False if it cannot be read directly."""
        wanted = held or (0, shape.numel())
        if not _is_plain(target, wanted[1] - wanted[0]) or str(target.dtype) != record.dtype:
            return False
        same = slices.same_slice(spec, shape, record)
        if same is None or tuple(spec.logical_shape) != record.logical_shape:
            return False
        memory = target.detach().view(-1).view(torch.uint8).numpy().data
        found = list(self._places(record, same, wanted, memory))
        if any(first is None for _, first, _ in found) or not self._take(target):
            return False
        for file, first, part in found:
            assert first is not None
            self.by_file.setdefault(file, []).append((first, part))
        return True

    def _places(
        self, record: TensorRecord, piece: Slice, wanted: Range, memory: memoryview
    ) -> Iterator[tuple[str, int | None, memoryview]]:
        """Yields (file, first byte there, memory for this byte and those after it)."""
        element = dtype_named(record.dtype).itemsize
        for stretch in self._positions.stretches(record, piece, wanted):
            low, high = common(wanted, stretch.elements)
            first = None if stretch.start is None else stretch.start + (low - stretch.elements[0]) * element
            yield stretch.file, first, memory[(low - wanted[0]) * element : (high - wanted[0]) * element]

    def _take(self, target: Tensor) -> bool:
        """Reserves the target's memory. Returns False if another tensor has reserved a part of it."""
        start = target.data_ptr()
        at = bisect(self._taken, start)
        if at % 2 or (at < len(self._taken) and self._taken[at] < start + target.nbytes):
            return False
        self._taken[at:at] = [start, start + target.nbytes]
        return True


def _is_plain(target: Tensor, elements: int) -> bool:
    return (
        target.device.type == "cpu"
        and type(target) in (Tensor, torch.nn.Parameter)
        and target.layout == torch.strided
        and target.is_contiguous()
        and not (target.is_conj() or target.is_neg())
        and target.numel() == elements > 0
    )
