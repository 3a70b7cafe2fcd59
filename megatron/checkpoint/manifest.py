"""manifest.json: the checksums of every file, and where the slices of every logical tensor are stored.

The manifest is checked too: it contains its own hash, and its text must be exactly what its content serialises to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron.checkpoint import paths, storage
from megatron.checkpoint.storage import FileRecord
from megatron.errors import CheckpointError

SCHEMA = 1
_DISTRIBUTED = (".metadata", "metadata.json")  # files of torch's and Megatron's distributed formats
_MAX_BYTES = 512 * 2**20


class MissingManifestError(CheckpointError):
    """A step directory without a manifest."""


class BrokenManifestError(CheckpointError):
    """The manifest exists but is not what was written."""


@dataclass(frozen=True)
class Slice:
    """One stored slice of a logical tensor."""

    file: str
    key: tuple[str, ...]  # path through the nested dict of that file
    ranges: tuple[tuple[int, int], ...] | None  # index ranges of the logical tensor's split dimension; None: all
    shape: tuple[int, ...]  # as stored, with any padding rows of a vocabulary


@dataclass(frozen=True)
class TensorRecord:
    logical_shape: tuple[int, ...]
    dtype: str
    dim: int
    slices: tuple[Slice, ...]
    fold: int = 1  # the number of dimensions from `dim` on that `ranges` index as one


@dataclass(frozen=True)
class Manifest:
    step: int
    consumed_train_samples: int
    consumed_valid_samples: int
    run_id: str
    layout: Mapping[str, int]
    versions: Mapping[str, str]
    fingerprint: Mapping[str, Any]  # determinism.py
    data: Mapping[str, Any]
    config: Mapping[str, Any]
    args: Mapping[str, Any]
    files: Mapping[str, FileRecord]
    model: Mapping[str, TensorRecord]
    optimizer: Mapping[str, Mapping[str, TensorRecord]] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)  # hf/origin.py; empty for a run started here
    holds: tuple[str, ...] = ()  # which of optimizer, scheduler and rng were saved
    schema: int = SCHEMA


def encode(manifest: Manifest) -> bytes:
    body = asdict(manifest)
    if not manifest.origin:
        del body["origin"]  # the format of a run that was started here stays as it was
    return storage.canonical_json({"manifest": body, "sha256": _digest(body)})


def decode(raw: bytes, path: Path) -> Manifest:
    try:
        outer = json.loads(raw)
        body = outer["manifest"]
        if raw != storage.canonical_json(outer) or _digest(body) != outer["sha256"]:
            raise BrokenManifestError(f"{path} does not match its own checksum: it was damaged or edited")
        if body["schema"] != SCHEMA:
            raise BrokenManifestError(f"{path} has schema {body['schema']}; this version reads {SCHEMA}")
        return _from_plain(body)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BrokenManifestError(f"{path} cannot be read as a manifest ({type(error).__name__}: {error})") from error


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(storage.canonical_json(body)).hexdigest()


def read(directory: Path) -> Manifest:
    """The manifest of one step directory."""
    path = directory / paths.MANIFEST
    if path.is_symlink():
        raise paths.UnsafePathError(f"{path} is a symbolic link; a checkpoint holds plain files only")
    if not paths.is_plain_file(path):
        if any((path.parent / name).exists() for name in _DISTRIBUTED):
            raise MissingManifestError(
                f"{path.parent} is in a distributed format (torch_dist, torch_dcp or fsdp_dtensor), which is not read "
                "yet; load it with the program that wrote it and save it with --ckpt-format torch at TP 1, PP 1"
            )
        raise MissingManifestError(f"{path} is missing: the checkpoint was never completed, or is not one of ours")
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise BrokenManifestError(f"{path} is larger than any manifest")
        raw = path.read_bytes()
    except OSError as error:
        raise BrokenManifestError(f"{path} cannot be read ({error.strerror})") from error
    return decode(raw, path)


def _from_plain(body: dict[str, Any]) -> Manifest:
    model = {name: _tensor(record) for name, record in body.pop("model").items()}
    optimizer = {
        name: {kind: _tensor(record) for kind, record in kinds.items()} for name, kinds in body.pop("optimizer").items()
    }
    files = {
        name: FileRecord(size=int(r["size"]), sha256=str(r["sha256"]), blocks=tuple(r["blocks"]))
        for name, r in body.pop("files").items()
    }
    holds = tuple(body.pop("holds"))
    return Manifest(model=model, optimizer=optimizer, files=files, holds=holds, **body)


def _tensor(record: dict[str, Any]) -> TensorRecord:
    return TensorRecord(
        logical_shape=tuple(record["logical_shape"]),
        dtype=str(record["dtype"]),
        dim=int(record["dim"]),
        slices=tuple(_slice(item) for item in record["slices"]),
        fold=int(record.get("fold", 1)),  # absent in the first versions
    )


def _slice(item: dict[str, Any]) -> Slice:
    ranges = item["ranges"]
    return Slice(
        file=str(item["file"]),
        key=tuple(item["key"]),
        ranges=None if ranges is None else tuple((int(a), int(b)) for a, b in ranges),
        shape=tuple(item["shape"]),
    )
