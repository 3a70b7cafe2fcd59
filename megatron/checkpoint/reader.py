"""Reads the tensors of one verified step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint import classic, paths, safe_load, slices
from megatron.checkpoint.manifest import Manifest, Slice, TensorRecord
from megatron.checkpoint.verify import DamagedCheckpointError, stored_problem
from megatron.distributed.shard import ShardSpec
from megatron.errors import CheckpointError


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

    def fill(self, spec: ShardSpec, target: Tensor, record: TensorRecord, *, cast: bool = False) -> None:
        def read(piece: Slice) -> Tensor:
            found = classic.lookup(self.file(piece.file), piece.key)
            if problem := stored_problem(record, piece, found):
                raise DamagedCheckpointError(f"{self.directory / piece.file}: {spec.name} {problem}")
            return found

        slices.fill(spec, target, record, read, cast=cast)

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

    def optimizer_like(self, name: str, spec: ShardSpec, stored_shape: torch.Size) -> dict[str, Tensor]:
        """The optimizer's tensors of one parameter, in that parameter's local shape."""
        found = {}
        for kind, record in self.manifest.optimizer.get(name, {}).items():
            shape = stored_shape if record.logical_shape == tuple(spec.logical_shape) else record.logical_shape
            found[kind] = torch.zeros(shape, dtype=_dtype(record.dtype))
            self.fill(spec, found[kind], record)
        return found

    def main_file(self) -> Any:
        """The first rank's file, which holds everything that is not split."""
        names = sorted(name for name in self.manifest.files if name.endswith(paths.MODEL_FILE))
        if not names:
            raise CheckpointError(f"{self.directory} holds no {paths.MODEL_FILE}")
        return self.file(names[0])


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise DamagedCheckpointError(f"the manifest names a dtype {name!r} that torch does not have")
    return found
