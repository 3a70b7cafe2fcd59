"""Index arrays kept between runs, keyed by what they were built from. A cache is valid or it is built again.

Every process may build and store at the same time: what they write is equal, each file appears whole, and the
description that makes an entry valid comes last. Nobody waits for anybody. Deleting it is always safe.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tokenize import TokenError
from typing import Any, Literal

import numpy as np

from megatron.data.files import as_bytes, storage_error, write_atomically
from megatron.errors import StorageError

FORMAT = 1
_MAPPED_FROM = 1 << 20  # bytes; smaller arrays are read, for a process may have only so many maps
_DAY = 24 * 3600.0  # seconds
_OWN_TEMPORARY = re.compile(r"\.[0-9a-f]{32}-[a-z]+\.(npy|json)\.\d+-[0-9a-f]{8}\.tmp")  # of write_atomically
# What numpy raises on damage: a header is parsed as Python, and may ask for any size.
_LOAD_ERRORS = (OSError, ValueError, EOFError, SyntaxError, TokenError, OverflowError, MemoryError, RecursionError)
_ATTEMPTS = 3  # at storing what somebody deletes meanwhile
Arrays = dict[str, np.ndarray]


class IndexCache:
    def __init__(self, directory: Path, *, required: bool = False) -> None:
        """`required`: the user named this directory, so not being able to write there is an error."""
        self.directory = directory
        self.required = required
        self.notes: list[str] = []  # what the user should be told

    def load_or_build(self, description: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:
        """The arrays of this description: mapped from disk if they are there and sound, else built and stored."""
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
            return arrays  # they would be read, not mapped
        del arrays  # never both copies in memory
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
            self._make_directory()
            try:
                return self._write(key, text, arrays)
            except StorageError as error:
                if attempt == _ATTEMPTS or not isinstance(error.__cause__, FileNotFoundError):
                    raise

    def _make_directory(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(self.directory, error) from error

    def _write(self, key: str, text: str, arrays: Arrays) -> None:
        # Not synced: what a power cut tears, its checksum gives away. Thousands of sources would wait for minutes.
        for name, array in arrays.items():
            write_atomically(self._path(key, f"{name}.npy"), _npy(array), sync=False)
        content = {"built_from": text, "crc": {name: _crc(array) for name, array in arrays.items()}}
        write_atomically(self._path(key, "description.json"), [json.dumps(content).encode()], sync=False)


class _DamagedError(Exception):
    """An entry that is there and cannot be used."""


def _crc(array: np.ndarray) -> int:
    return zlib.crc32(f"{array.dtype.str}{array.shape}".encode(), zlib.crc32(as_bytes(array)))


def _npy(array: np.ndarray) -> Iterator[bytes | memoryview]:
    header = io.BytesIO()
    np.lib.format.write_array_header_2_0(header, np.lib.format.header_data_from_array_1_0(array))
    yield header.getvalue()
    yield as_bytes(array)


def remove_leftovers(directory: Path) -> None:
    """Files that killed builders left half-written. Nobody writes one for a day."""
    long_ago = time.time() - _DAY
    for path in directory.glob(".*.tmp"):
        if not _OWN_TEMPORARY.fullmatch(path.name):
            continue
        with suppress(OSError):  # another process removes it, too, or may and we may not
            if path.stat().st_mtime < long_ago:
                path.unlink()


def cache_directory(asked: str | None, prefix: str) -> Path:
    """Where indices of this data are kept: where the user said, else beside the data, else in the temporary space."""
    if asked is not None:
        return Path(asked)
    beside = Path(prefix).absolute().parent
    if os.access(beside, os.W_OK | os.X_OK):
        return beside / "index-cache"
    return _private_temporary()


def _private_temporary() -> Path:
    """A directory that no other user of the machine can write to."""
    directory = Path(tempfile.gettempdir()) / f"megatron-index-cache-{os.getuid()}"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        if directory.lstat().st_uid == os.getuid() and not directory.is_symlink():
            return directory
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="megatron-index-cache-"))
