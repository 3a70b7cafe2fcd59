"""One rank's share of a step: its files, and a record of them, in a directory that appears by one rename."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import get_num_threads

from megatron.checkpoint import manifest, paths, storage
from megatron.checkpoint.content import Part
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.verify import DamagedCheckpointError
from megatron.errors import CheckpointError
from megatron.utils.typed import json_value, typed

_RANK = "rank_"
_SCHEMAS = (3, manifest.SCHEMA)  # schema 3 has no starts and no files of plain values


@dataclass(frozen=True)
class ShareRecord:
    save: str
    """Id of the save: the same in all its shares, and in no others."""
    rank: int
    ranks: int
    header: Manifest
    part: Part


def rank_directory(root: Path, rank: int) -> Path:
    return root / f"{_RANK}{rank:05d}"


def rank_directories(root: Path) -> Iterator[tuple[int, Path]]:
    for path in sorted(root.glob(f"{_RANK}*")):
        number = path.name.removeprefix(_RANK)
        if number.isdecimal() and rank_directory(root, int(number)) == path:
            yield int(number), path


def encode(record: ShareRecord) -> bytes:
    body = json_value(record)
    return storage.canonical_json({"share": body, "sha256": _digest(body)})


def decode(raw: bytes, path: Path) -> ShareRecord:
    try:
        outer = json.loads(raw)
        body = outer["share"]
        if _digest(body) != outer["sha256"]:
            raise DamagedCheckpointError(f"{path} does not match its own checksum: it was damaged or edited")
        record = typed(ShareRecord, body)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} cannot be read as a share of a checkpoint ({error})"[:400]) from error
    if record.header.schema not in _SCHEMAS or record.header.hash not in storage.HASHES:
        raise DamagedCheckpointError(f"{path} was written by another version; use that version")
    return record


def _digest(body: object) -> str:
    return hashlib.sha256(storage.canonical_json({"": body})).hexdigest()


def read(directory: Path) -> ShareRecord:
    """Reads the record of a share. Raises a CheckpointError unless all files exist with the recorded sizes."""
    path = directory / paths.SHARE
    if not paths.is_plain_file(path):
        raise DamagedCheckpointError(f"{path} is missing")
    try:
        record = decode(path.read_bytes(), path)
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read ({error.strerror})") from error
    for name, expected in record.part.files.items():
        file = paths.member(directory, name)
        if not paths.is_plain_file(file) or file.stat().st_size != expected.size:
            raise DamagedCheckpointError(f"{file} does not have the {expected.size} bytes that were written")
    return record


def damage(directory: Path, record: ShareRecord) -> str | None:
    """Describes the first damage to a share's files, by their checksums; None if there is none."""
    try:
        for name, expected in record.part.files.items():
            path, blocks = paths.member(directory, name), range(len(expected.blocks))
            if storage.hash_blocks(path, blocks, record.header.hash, get_num_threads()) != expected.blocks:
                return f"{directory / name} differs from what was written"
    except (OSError, CheckpointError) as error:
        return f"{directory} cannot be read ({error})"
    return None
