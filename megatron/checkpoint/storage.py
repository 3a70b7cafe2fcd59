"""Durable writing: what is said to be on disk is on disk, and a file is either whole or absent.

Every change of the directory tree goes through these functions, so a test can stop the process at any one of them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megatron.errors import StorageError

BLOCK_BYTES = 16 * 2**20
_READ_BYTES = 2**20


@dataclass(frozen=True)
class FileRecord:
    """What the manifest says about one file."""

    size: int
    sha256: str
    blocks: tuple[str, ...]  # sha256 of every 16 MiB block, so that a damaged place has an address


class BlockHasher:
    """The hash of a stream and of each of its blocks, in one pass."""

    def __init__(self) -> None:
        self._whole = hashlib.sha256()
        self._block = hashlib.sha256()
        self._in_block = 0
        self._blocks: list[str] = []
        self._size = 0

    def update(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        self._whole.update(view)
        self._size += len(view)
        while len(view):
            part = view[: BLOCK_BYTES - self._in_block]
            self._block.update(part)
            self._in_block += len(part)
            view = view[len(part) :]
            if self._in_block == BLOCK_BYTES:
                self._close_block()

    def _close_block(self) -> None:
        self._blocks.append(self._block.hexdigest())
        self._block = hashlib.sha256()
        self._in_block = 0

    def record(self) -> FileRecord:
        blocks = [*self._blocks, self._block.hexdigest()] if self._in_block else list(self._blocks)
        return FileRecord(size=self._size, sha256=self._whole.hexdigest(), blocks=tuple(blocks))


class HashingFile:
    """A file for `torch.save` to write to: what is hashed is what was handed to the disk, not a later re-read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hasher = BlockHasher()

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        self._hasher.update(view)
        written = self._file.write(view)
        if written != len(view):
            raise OSError(errno.ENOSPC, f"only {written} of {len(view)} bytes written")
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    def record(self) -> FileRecord:
        return self._hasher.record()


def write_durable(path: Path, write: Callable[[HashingFile], object]) -> FileRecord:
    """Create `path`, let `write` fill it, then flush, fsync, close. The directory is the caller's to fsync."""
    with open(path, "xb") as raw:
        file = HashingFile(raw)
        write(file)
        raw.flush()
        os.fsync(raw.fileno())
    return file.record()


def write_bytes(path: Path, data: bytes) -> FileRecord:
    return write_durable(path, lambda file: file.write(data))


def replace_bytes(path: Path, data: bytes) -> None:
    """The whole new content or the whole old one, at any crash."""
    temporary = path.with_name(f".tmp-{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    write_bytes(temporary, data)
    temporary.replace(path)
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(root: Path) -> None:
    """Make the names below `root` durable, the deepest first."""
    for directory, _, _ in os.walk(root, topdown=False):
        fsync_directory(Path(directory))


def fsync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """As `mkdir -p`; the new names are made durable in their parents."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir()
        fsync_directory(directory.parent)


def rename(source: Path, target: Path) -> None:
    """A rename to a name that must be free, durable when it returns."""
    if target.exists():
        raise OSError(errno.EEXIST, "the target name is taken", str(target))
    source.rename(target)
    fsync_directory(target.parent)


def remove_tree(path: Path) -> None:
    shutil.rmtree(path)


def hash_file(path: Path) -> FileRecord:
    hasher = BlockHasher()
    with open(path, "rb") as file:
        while data := file.read(_READ_BYTES):
            hasher.update(data)
    return hasher.record()


def free_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free


def canonical_json(value: Mapping[str, Any]) -> bytes:
    """One value, one text: a file that differs from it in any byte was not written by us."""
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=True, allow_nan=False) + "\n").encode()


@contextmanager
def storage_errors(doing: str, path: Path) -> Iterator[None]:
    """The disk's own words, with what was being done and where."""
    try:
        yield
    except OSError as error:
        raise StorageError(storage_message(doing, path, error)) from error
    except RuntimeError as error:  # torch's file writer wraps the disk's error
        cause = error.__context__
        if isinstance(cause, OSError):
            raise StorageError(storage_message(doing, path, cause)) from error
        raise


def storage_message(doing: str, path: Path, error: OSError) -> str:
    reason = error.strerror or str(error)
    place = error.filename or path
    return f"{doing} failed at {place}: {reason}; earlier checkpoints are untouched. Make room there or change --save"
