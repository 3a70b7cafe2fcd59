"""Reads the tensors of one verified step."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint import classic, paths, safe_load, slices
from megatron.checkpoint.manifest import Manifest, Slice, TensorRecord
from megatron.checkpoint.verify import DamagedCheckpointError, stored_problem
from megatron.errors import CheckpointError
from megatron.state.division import Range, common
from megatron.state.shard import Shard


class StepReader:
    """Opens files when they are first needed and maps them, so only what is copied is read."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest
        self._files: dict[str, Any] = {}

    def file(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = safe_load.load_file(paths.member(self.directory, name))
        return self._files[name]

    def value(self, name: str, *key: str) -> Any:
        """What a file has at a path of its nested dicts, or None."""
        return classic.lookup(self.file(name), key)

    def elements(self, spec: Shard, record: TensorRecord, piece: Slice, held: Range) -> Tensor:
        """Some consecutive elements of a slice, in one dimension: of its files, those that hold them are opened."""
        parts = []
        for file, (start, stop) in self.manifest.places(piece, held):
            found = self.value(file, *piece.key)
            if problem := stored_problem(record, piece, found, (start, stop)):
                raise DamagedCheckpointError(f"{self.directory / file}: {spec.name} {problem}")
            low, high = common(held, (start, stop))
            parts.append(found.view(-1)[low - start : high - start])
        if not parts:
            return torch.empty(0, dtype=_dtype(record.dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def fill(self, spec: Shard, target: Tensor, record: TensorRecord, *, cast: bool = False) -> None:
        def read(piece: Slice) -> Tensor:
            return self.elements(spec, record, piece, (0, piece.elements)).view(piece.shape)

        slices.fill(spec, target, record, read, cast=cast)

    def mapped(self, spec: Shard, like: Tensor, record: TensorRecord, *, cast: bool) -> Tensor | None:
        """The tensor as it is in its file, unread, if it is stored as `like` describes it."""
        for piece in record.slices:
            if not piece.share and piece.ranges == spec.ranges and piece.shape == tuple(like.shape):
                slices.check_compatible(spec, like.dtype, record, cast=cast)
                return self.elements(spec, record, piece, (0, piece.elements)).view(piece.shape)
        return None

    def logical(self, name: str, record: TensorRecord) -> Tensor:
        """A whole tensor in its stored shape, without padding rows."""
        spec = slices.whole_spec(name, record)
        full = torch.empty(slices.whole_stored_shape(record), dtype=_dtype(record.dtype))
        self.fill(spec, full, record)
        return full

    def model_tensors(self) -> dict[str, Tensor]:
        return {name: self.logical(name, record) for name, record in self.manifest.model.items()}

    def model_dtype(self) -> torch.dtype:
        """The dtype that the parameters were trained in."""
        return _dtype(next(iter(self.manifest.model.values())).dtype)

    def optimizer_like(
        self, name: str, spec: Shard, stored_shape: torch.Size, held: Range | None = None
    ) -> dict[str, Tensor]:
        """The optimizer's tensors of one parameter, in that parameter's local shape, or `held` elements of them in one
        dimension; those with another logical shape (the row and column means of Adafactor) whole. What a file has as it
        is wanted is mapped, not copied."""
        found = {}
        for kind, record in self.manifest.optimizer.get(name, {}).items():
            if (ready := self.ready(name, kind)) is not None:
                found[kind] = ready
                continue
            if record.logical_shape != tuple(spec.logical_shape):
                slices.check_is_whole(f"{kind} of {name}", record)
                found[kind] = self.logical(name, record)
                continue
            wanted, read = held or (0, stored_shape.numel()), partial(self.elements, spec, record)
            tensor = slices.read_elements(spec, stored_shape, _dtype(record.dtype), wanted, record, read)
            found[kind] = tensor.view(stored_shape) if held is None else tensor
        return found

    def ready(self, name: str, kind: str) -> Tensor | None:
        """A tensor of the optimizer that has been read already."""
        return None

    def main_file(self) -> Any:
        """The content of `main_name`."""
        return self.file(self.main_name())

    def main_value(self, *key: str) -> Any:
        return self.value(self.main_name(), *key)

    def main_name(self) -> str:
        """The first rank's file, which holds everything that is not split."""
        names = sorted(name for name in self.manifest.files if name.endswith(paths.MODEL_FILE))
        if not names:
            raise CheckpointError(f"{self.directory} holds no {paths.MODEL_FILE}")
        return names[0]


class PlannedReader(StepReader):
    """Opens nothing: it notes the names of the files that a StepReader would open. What it gives has no content, and
    what is to be filled stays as it is."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        super().__init__(directory, manifest)
        self.names: set[str] = set()

    def file(self, name: str) -> Any:
        self.names.add(name)
        return _Nothing()

    def value(self, name: str, *key: str) -> Any:
        return self.file(name)

    def elements(self, spec: Shard, record: TensorRecord, piece: Slice, held: Range) -> Tensor:
        self.names |= {file for file, _ in self.manifest.places(piece, held)}
        return torch.empty(held[1] - held[0], dtype=_dtype(record.dtype), device="meta")

    def fill(self, spec: Shard, target: Tensor, record: TensorRecord, *, cast: bool = False) -> None:
        super().fill(spec, torch.empty_like(target, device="meta"), record, cast=cast)


class _Nothing(dict[Any, Any]):
    """Has every key."""

    def __missing__(self, key: object) -> _Nothing:
        return _Nothing()


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise DamagedCheckpointError(f"the manifest names a dtype {name!r} that torch does not have")
    return found
