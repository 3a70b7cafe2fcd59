"""manifest.json: the checksums of every file, and where the slices of every logical tensor are stored.

The manifest is checked too: it contains its own hash, and its text must be exactly what its content serialises to. That
hash is sha256 in every schema: so an older program gets as far as the schema, and names what it does not know.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from megatron.checkpoint import paths, storage
from megatron.checkpoint.storage import FileRecord
from megatron.errors import CheckpointError
from megatron.utils.typed import typed

SCHEMA = 2
_DISTRIBUTED = (".metadata", "metadata.json")  # files of torch's and Megatron's distributed formats
_ALWAYS_READ = 4 * 2**20  # bytes; a larger manifest is read if the files that it describes are larger still
_MOST_DIMENSIONS = 16


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
    hash: str = storage.HASH  # of the files' blocks
    schema: int = SCHEMA

    def blocks_of(self, part: int, parts: int) -> dict[str, range]:
        """One of `parts` equal parts of the blocks of all files, one file after the other: by file, consecutive."""
        total = sum(len(file.blocks) for file in self.files.values())
        start, stop = total * part // parts, total * (part + 1) // parts
        share, before = {}, 0
        for name, file in self.files.items():
            blocks = range(max(start - before, 0), min(stop - before, len(file.blocks)))
            if blocks:
                share[name] = blocks
            before += len(file.blocks)
        return share


def encode(manifest: Manifest) -> bytes:
    body = asdict(manifest)
    if not manifest.origin:
        del body["origin"]  # the format of a run that was started here stays as it was
    return storage.canonical_json({"manifest": body, "sha256": _digest(body)})


def decode(raw: bytes, path: Path) -> Manifest:
    try:
        outer = json.loads(raw)
        if b"\\ud" in raw:  # half of a surrogate pair is JSON, and no text
            json.dumps(outer, ensure_ascii=False).encode()
        body = outer["manifest"]
        if raw != storage.canonical_json(outer) or _digest(body) != outer["sha256"]:
            raise BrokenManifestError(f"{path} does not match its own checksum: it was damaged or edited")
        if body["schema"] == 1:
            body = _of_schema_1(body)
        if body["schema"] != SCHEMA:
            raise BrokenManifestError(f"{path} has schema {body['schema']}; this version reads 1 to {SCHEMA}")
        manifest = typed(Manifest, body)
        if manifest.hash not in storage.HASHES:
            raise BrokenManifestError(
                f"{path} has {manifest.hash[:40]} checksums; this version knows {', '.join(storage.HASHES)}"
            )
        _check_numbers(manifest)
        return manifest
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise BrokenManifestError(f"{path} cannot be read as a manifest ({reason})") from error


def _of_schema_1(body: Mapping[str, Any]) -> dict[str, Any]:
    """As of today: there were sha256 alone, of every block and of the whole file once more."""
    files = {name: {"size": file["size"], "blocks": file["blocks"]} for name, file in body["files"].items()}
    return {**body, "files": files, "hash": "sha256", "schema": SCHEMA}


def _check_numbers(manifest: Manifest) -> None:
    """Shapes and positions that no tensor has. A ValueError says which."""
    if manifest.step < 0 or any(record.size < 0 for record in manifest.files.values()):
        raise ValueError("a negative step or size")
    kinds = [("model", manifest.model), *manifest.optimizer.items()]
    for name, record in [(f"{group} {name}", record) for group, records in kinds for name, record in records.items()]:
        shapes = [record.logical_shape, *(piece.shape for piece in record.slices)]
        ends = [end for piece in record.slices for pair in piece.ranges or () for end in pair]
        if record.fold < 1 or any(number < 0 for number in [*(n for shape in shapes for n in shape), *ends]):
            raise ValueError(f"{name[:100]} has a negative size or position")
        stored = [prod(piece.shape) for piece in record.slices]
        if max(map(len, shapes)) > _MOST_DIMENSIONS or (stored and prod(record.logical_shape) > sum(stored)):
            raise ValueError(f"{name[:100]} is larger than its slices")
        for piece, elements in zip(record.slices, stored, strict=True):
            if piece.file in manifest.files and elements > manifest.files[piece.file].size:
                raise ValueError(f"{name[:100]} has a slice of {elements} elements, more than the bytes of its file")


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(storage.canonical_json(body)).hexdigest()


def _of_the_others(directory: Path) -> int:
    """Bytes of the weight files, which a manifest of many slices grows with."""
    return sum(path.lstat().st_size for path in directory.rglob("*.pt"))


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
        size = path.stat().st_size
        if size > _ALWAYS_READ and size > _of_the_others(directory):
            raise BrokenManifestError(f"{path} has {size} bytes, more than the files that it describes")
        raw = path.read_bytes()
    except OSError as error:
        raise BrokenManifestError(f"{path} cannot be read ({error.strerror})") from error
    return decode(raw, path)
