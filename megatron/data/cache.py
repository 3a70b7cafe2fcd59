"""Caches index arrays between runs, keyed by what they were built from. A damaged entry is rebuilt.

Processes may build and store the same entry concurrently without waiting: they write equal content, each file is
replaced atomically, and the description that makes an entry valid is written last. Deleting a cache is always safe.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tokenize import TokenError
from typing import Any, Literal

import numpy as np

from megatron.data.indexed.files import as_bytes
from megatron.errors import StorageError
from megatron.utils.durable import target_of, write_atomically, writing

FORMAT = 1
_MAPPED_FROM = 1 << 20  # bytes; smaller arrays are read, because the number of maps of a process is limited
_DAY = 24 * 3600.0  # seconds
_ENTRY = re.compile(r"[0-9a-f]{32}-[a-z]+\.(npy|json)")
# What numpy raises on damage: the header is parsed as Python and may name any size.
_LOAD_ERRORS = (OSError, ValueError, EOFError, SyntaxError, TokenError, OverflowError, MemoryError, RecursionError)
_ATTEMPTS = 3  # at storing an entry while its directory is being deleted
Arrays = dict[str, np.ndarray]


class IndexCache:
    def __init__(self, directory: Path, *, required: bool = False) -> None:
        """`required`: the user named this directory, so failing to write there is an error, not a note."""
        self.directory = directory
        self.required = required
        self.notes: list[str] = []  # what the user should be told

    def load_or_build(self, description: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:
        """Returns the arrays of this description, mapped from a valid cache entry or else built and stored."""
        text = json.dumps({"format": FORMAT, **description}, sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()[:32]
        try:
            loaded = self._load(key, text)
        except _DamagedError as damage:
            self.notes.append(f"index cache {damage}: built again")
            loaded = None
        if loaded is not None:
            return loaded
        arrays = build()
        try:
            self._store(key, text, arrays)
        except StorageError as error:
            if self.required:
                raise StorageError(f"--data-cache-path {self.directory}: {error}") from error
            self.notes.append(f"index cache not stored, so built at every start: {error}")
            return arrays
        if all(array.nbytes <= _MAPPED_FROM for array in arrays.values()):
            return arrays  # reading them back would map nothing
        del arrays  # not both copies in memory at once
        try:
            loaded = self._load(key, text)  # mapped: the ranks of a machine share one copy
        except _DamagedError as damage:
            self.notes.append(f"index cache {damage}: not used, though it was written just now")
        return build() if loaded is None else loaded

    def _path(self, key: str, name: str) -> Path:
        return self.directory / f"{key}-{name}"

    def _load(self, key: str, text: str) -> Arrays | None:
        marker = self._path(key, "description.json")
        try:
            stored = json.loads(marker.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise _DamagedError(f"{marker}: {error}") from None
        if not isinstance(stored, dict) or stored.get("built_from") != text or not isinstance(stored.get("crc"), dict):
            raise _DamagedError(f"{marker}: not the description of this index")
        return {name: self._load_array(self._path(key, f"{name}.npy"), crc) for name, crc in stored["crc"].items()}

    def _load_array(self, path: Path, crc: int) -> np.ndarray:
        try:
            mode: Literal["r"] | None = "r" if path.stat().st_size > _MAPPED_FROM else None
            array = np.load(path, mmap_mode=mode, allow_pickle=False).view(np.ndarray)
        except _LOAD_ERRORS as error:
            raise _DamagedError(f"{path}: {error}") from None
        if _crc(array) != crc:
            raise _DamagedError(f"{path}: checksum differs")
        return array

    def _store(self, key: str, text: str, arrays: Arrays) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            with writing(self.directory):
                self.directory.mkdir(parents=True, exist_ok=True)
            try:
                return self._write(key, text, arrays)
            except StorageError as error:
                if attempt == _ATTEMPTS or not isinstance(error.__cause__, FileNotFoundError):
                    raise

    def _write(self, key: str, text: str, arrays: Arrays) -> None:
        for name, array in arrays.items():
            self._write_file(self._path(key, f"{name}.npy"), _npy(array))
        content = {"built_from": text, "crc": {name: _crc(array) for name, array in arrays.items()}}
        self._write_file(self._path(key, "description.json"), [json.dumps(content).encode()])

    def _write_file(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        # Not synced: checksums detect files torn by a power cut, and thousands of fsyncs would take minutes.
        with writing(path):
            write_atomically(path, chunks, sync=False)


class _DamagedError(Exception):
    """The entry exists but cannot be used."""


def _crc(array: np.ndarray) -> int:
    return zlib.crc32(f"{array.dtype.str}{array.shape}".encode(), zlib.crc32(as_bytes(array)))


def _npy(array: np.ndarray) -> Iterator[bytes | memoryview]:
    header = io.BytesIO()
    np.lib.format.write_array_header_2_0(header, np.lib.format.header_data_from_array_1_0(array))
    yield header.getvalue()
    yield as_bytes(array)


def remove_leftovers(directory: Path) -> None:
    """Removes temporary files of killed builders: those older than a day, longer than any write takes."""
    long_ago = time.time() - _DAY
    for path in directory.glob(".*.tmp"):
        if not _ENTRY.fullmatch(target_of(path.name) or ""):
            continue
        with suppress(OSError):  # another process removed it, or we lack the permission
            if path.stat().st_mtime < long_ago:
                path.unlink()


def cache_directory(asked: str | None, prefix: str) -> Path:
    """The directory for the indices of this data: the user's, else beside the data, else a temporary one."""
    if asked is not None:
        return Path(asked)
    beside = Path(prefix).absolute().parent
    if os.access(beside, os.W_OK | os.X_OK):
        return beside / "index-cache"
    return _private_temporary()


def _private_temporary() -> Path:
    """A temporary directory that no other user can write to."""
    directory = Path(tempfile.gettempdir()) / f"megatron-index-cache-{os.getuid()}"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        if directory.lstat().st_uid == os.getuid() and not directory.is_symlink():
            return directory
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="megatron-index-cache-"))
