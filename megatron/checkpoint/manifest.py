"""manifest.json: the checksums of every file, and the byte position of every slice of every logical tensor.

The manifest verifies itself: it contains its own hash, and its text must equal the serialisation of its content. The
hash is sha256 in every schema, so an older version can verify a newer manifest and report that its schema is unknown.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from megatron.checkpoint import paths, storage
from megatron.checkpoint.lineage import Line
from megatron.checkpoint.storage import FileRecord
from megatron.errors import CheckpointError
from megatron.utils.typed import typed

SCHEMA = 4
_ALWAYS_READ = 4 * 2**20  # bytes; a larger manifest must be smaller than the files that it describes
_MOST_DIMENSIONS = 16
_LARGEST = 2**60  # of samples and bytes: their products must fit into 64 bits
_BEFORE_BODY, _AFTER_BODY = b'{\n "manifest": ', b',\n "sha256": "%s"\n}\n'


class MissingManifestError(CheckpointError):
    """A step directory without a manifest."""


class BrokenManifestError(CheckpointError):
    """The manifest exists but is not what was written."""


@dataclass(frozen=True)
class Slice:
    """One stored slice of a logical tensor. A divided slice is spread over several files; each has the elements of one
    share, in one dimension."""

    file: str  # for a divided slice, its name in `Manifest.divisions`
    key: tuple[str, ...]  # path through the nested dict of that file
    ranges: tuple[tuple[int, int], ...] | None  # index ranges of the logical tensor's split dimension; None: all
    shape: tuple[int, ...]  # as stored, with any padding rows of a vocabulary
    share: int = 0  # elements of the row in each file (division.py); 0: the slice is whole, in one file
    offset: int = 0  # where the slice begins in that row
    row: int = 0  # number of the row (division.py)
    start: int | None = None  # first byte in the file; None if divided, or before schema 4

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class TensorRecord:
    logical_shape: tuple[int, ...]
    dtype: str
    dim: int
    slices: tuple[Slice, ...]
    fold: int = 1  # number of dimensions, starting at `dim`, that `ranges` index as one flattened dimension


@dataclass(frozen=True)
class DividedFiles:
    """The files of a division, by rank, and the first byte of each kind of tensor in them (positions.py)."""

    files: tuple[str, ...]
    starts: Mapping[str, int] = field(default_factory=dict)  # the same in all; empty before schema 4
    first: Mapping[str, int] = field(default_factory=dict)  # those of the first file, if it has others

    def start(self, kind: str, rank: int) -> int | None:
        return (self.first if self.first and rank == 0 else self.starts).get(kind)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The run that saved a step, and its progress."""

    step: int
    consumed_train_samples: int
    consumed_valid_samples: int
    run_id: str
    layout: Mapping[str, int]
    versions: Mapping[str, str]
    fingerprint: Mapping[str, Any]  # conditions of computing (determinism.py)
    data: Mapping[str, Any]
    config: Mapping[str, Any]
    args: Mapping[str, Any]
    origin: Mapping[str, Any] = field(default_factory=dict)  # hf/origin.py; empty for a run started here
    holds: tuple[str, ...] = ()  # which of optimizer, scheduler and rng were saved
    line: Line | None = None  # lineage of a non-persistent step; None for others


@dataclass(frozen=True, kw_only=True)
class Manifest(RunRecord):
    """A step: its run, its files, and the places of the tensors in them."""

    files: Mapping[str, FileRecord]
    model: Mapping[str, TensorRecord]
    optimizer: Mapping[str, Mapping[str, TensorRecord]] = field(default_factory=dict)
    divisions: Mapping[str, DividedFiles] = field(default_factory=dict)  # files of divided slices
    hash: str = storage.HASH  # algorithm for the files' blocks
    schema: int = SCHEMA

    def bytes_listed(self) -> tuple[dict[str, int], dict[str, int]]:
        """Returns the size of each file, and the total size of each division whose files are all listed."""
        sizes = {name: file.size for name, file in self.files.items()}
        divisions = {name: each.files for name, each in self.divisions.items()}
        complete = {name: files for name, files in divisions.items() if all(file in sizes for file in files)}
        return sizes, {name: sum(sizes[file] for file in files) for name, files in complete.items()}

    def blocks_of(self, part: int, parts: int) -> dict[str, range]:
        """Splits the blocks of all files, in order, into `parts` equal parts. Returns one part, a range per file."""
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
    for optional in ("origin", "divisions", "line"):  # defaults are left out
        if not body[optional]:
            del body[optional]
    for division in body.get("divisions", {}).values():
        if not division["first"]:
            del division["first"]
    for records in (body["model"], *body["optimizer"].values()):
        for piece in (piece for record in records.values() for piece in record["slices"]):
            for name in ("start",) if piece["share"] else ("share", "offset", "row"):
                del piece[name]
    text = storage.canonical_json(body)
    return _BEFORE_BODY + _indented(text) + _AFTER_BODY % hashlib.sha256(text).hexdigest().encode()


def decode(raw: bytes, path: Path) -> Manifest:
    try:
        outer = json.loads(raw)
        if b"\\ud" in raw:  # half of a surrogate pair is valid JSON, but not valid text
            json.dumps(outer, ensure_ascii=False).encode()
        body = outer["manifest"]
        if not _is_unchanged(raw, outer["sha256"]):
            raise BrokenManifestError(f"{path} does not match its own checksum: it was damaged or edited")
        if body["schema"] not in range(1, SCHEMA + 1):
            raise BrokenManifestError(
                f"{path} has schema {body['schema']}; this version reads 1 to {SCHEMA}; use a newer version"
            )
        manifest = typed(Manifest, _upgraded(body))
        if manifest.hash not in storage.HASHES:
            raise BrokenManifestError(
                f"{path} has {manifest.hash[:40]} checksums; this version knows {', '.join(storage.HASHES)}; "
                "use a newer version"
            )
        check_numbers(manifest)
        return manifest
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise BrokenManifestError(f"{path} cannot be read as a manifest ({reason})") from error


def _upgraded(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Converts to the current schema. Schema 1 had only sha256, of every block and of the whole file. In schema 3, a
    division had only its files. Before schema 4 there were no first bytes: each file itself describes where its
    tensors begin."""
    if body["schema"] == 1:
        files = {name: {"size": file["size"], "blocks": file["blocks"]} for name, file in body["files"].items()}
        body = {**body, "files": files, "hash": "sha256"}
    if body["schema"] == 3:
        body = {**body, "divisions": {name: {"files": files} for name, files in body.get("divisions", {}).items()}}
    return {**body, "schema": SCHEMA}


def all_tensors(manifest: Manifest) -> list[tuple[str, TensorRecord]]:
    optimizer = [(f"{n} ({kind})", t) for n, kinds in manifest.optimizer.items() for kind, t in kinds.items()]
    return [*manifest.model.items(), *optimizer]


def check_numbers(manifest: Manifest) -> None:
    """Raises a ValueError that names the first impossible shape or position."""
    counts = [manifest.step, manifest.consumed_train_samples, manifest.consumed_valid_samples]
    if not all(0 <= count < _LARGEST for count in [*counts, *(record.size for record in manifest.files.values())]):
        raise ValueError("a step, a number of samples or a size is negative or too large")
    of_files, of_divisions = manifest.bytes_listed()
    for name, record in all_tensors(manifest):
        shapes = [record.logical_shape, *(piece.shape for piece in record.slices)]
        ends = [end for piece in record.slices for pair in piece.ranges or () for end in pair]
        if record.fold < 1 or any(number < 0 for number in [*(n for shape in shapes for n in shape), *ends]):
            raise ValueError(f"{name[:100]} has a negative size or position")
        stored = [piece.elements for piece in record.slices]
        if max(map(len, shapes)) > _MOST_DIMENSIONS or (stored and prod(record.logical_shape) > sum(stored)):
            raise ValueError(
                f"{name[:100]} has more than {_MOST_DIMENSIONS} dimensions, or more elements than its slices"
            )
        for piece, elements in zip(record.slices, stored, strict=True):
            if piece.share < 0 or piece.offset < 0:
                raise ValueError(f"{name[:100]} has a negative share ({piece.share}) or offset ({piece.offset})")
            files = len(manifest.divisions[piece.file].files) if piece.file in manifest.divisions else 0
            if piece.share and ((files and piece.offset + elements > piece.share * files) or not piece.key):
                raise ValueError(
                    f"{name[:100]} has a slice without a key, or elements after the last of its {files} files"
                )
            if piece.share * max(files, 1) > _LARGEST:
                raise ValueError(f"{name[:100]} has too many elements: shares of {piece.share} in {files} files")
            if elements > (of_divisions if piece.share else of_files).get(piece.file, elements):
                raise ValueError(f"{name[:100]} has a slice of {elements} elements, more than the bytes of its file")


def _is_unchanged(raw: bytes, digest: str) -> bool:
    """True if a file is byte for byte what `encode` wrote. The JSON is not encoded again, which takes longer than
    reading it."""
    after = _AFTER_BODY % str(digest).encode()
    body = raw.removeprefix(_BEFORE_BODY).removesuffix(after)
    text = body.replace(b"\n ", b"\n") + b"\n"
    same = _BEFORE_BODY + _indented(text) + after == raw
    return same and hashlib.sha256(text).hexdigest() == digest


def _indented(text: bytes) -> bytes:
    """Indents canonical JSON for use as a value of an object."""
    return text.removesuffix(b"\n").replace(b"\n", b"\n ")


def read(directory: Path) -> Manifest:
    """Reads the manifest of a step directory."""
    path = directory / paths.MANIFEST
    if path.is_symlink():
        raise paths.UnsafePathError(f"{path} is a symbolic link; a checkpoint holds plain files only")
    if not paths.is_plain_file(path):
        raise MissingManifestError(f"{path} is missing: the checkpoint is incomplete, or another program wrote it")
    try:
        size = path.stat().st_size
        if size > _ALWAYS_READ and size > sum(path.lstat().st_size for path in directory.rglob("*.pt")):
            raise BrokenManifestError(f"{path} has {size} bytes, more than the files that it describes")
        raw = path.read_bytes()
    except OSError as error:
        raise BrokenManifestError(f"{path} cannot be read ({error.strerror})") from error
    return decode(raw, path)
