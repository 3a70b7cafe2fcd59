"""Caches index arrays between runs, keyed by what they were built from. A damaged entry is rebuilt.

One process builds an entry and the others map it (see `claim`). Two concurrent builds are harmless: they write equal
content, each file is replaced atomically, and the description that makes an entry valid is written last. Deleting a
cache is always safe.
"""

import hashlib
import io
import json
import os
import re
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any, Literal

import numpy as np

from megatron.data.claim import Claim
from megatron.data.indexed.files import array_bytes
from megatron.errors import StorageError
from megatron.utils.durable import target_of, write_atomically, writing

FORMAT = 1
_MAPPED_FROM = 1 << 20  # bytes; smaller arrays are read, because the number of maps of a process is limited
_DAY = 24 * 3600.0  # seconds
_ENTRY, _CLAIM = re.compile(r"[0-9a-f]{32}-[a-z]+\.(npy|json)"), re.compile(r"\.[0-9a-f]{32}-claim\.lock")
# What numpy raises on damage: the header is parsed as Python and may name any size.
_LOAD_ERRORS = (OSError, ValueError, EOFError, SyntaxError, TokenError, OverflowError, MemoryError, RecursionError)
_ATTEMPTS = 3  # to store an entry while its directory is being deleted
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class CachePlace:
    """The directories of cached indices, and the users whose entries are trusted."""

    directory: Path
    required: bool = False
    """True if the user named this directory: a failed write is then an error, not a note."""
    shared: Path | None = None
    """A second directory, from which entries are only read."""
    trusted: frozenset[int] | None = None
    """The users whose entries are read (None: all users). The author of an index decides which tokens a run sees."""

    @staticmethod
    def of(asked: str | None, prefix: str, files: Sequence[str] | None = None) -> "CachePlace":
        """Chooses the place for the indices of this data: the directory `asked` (trusted), else beside the data, else a
        temporary directory. Beside another user's data each user has a separate directory. `files` are the data files,
        by default the .bin and .idx of `prefix`."""
        if asked is not None:
            return CachePlace(Path(asked), required=True)
        beside, me = Path(prefix).absolute().parent, os.getuid()
        if not os.access(beside, os.W_OK | os.X_OK):
            return CachePlace(_private_temporary(), trusted=frozenset({me}))
        owners = {Path(file).stat().st_uid for file in files or (f"{prefix}.bin", f"{prefix}.idx")}
        trusted, shared = frozenset({me, 0, *owners}), beside / "index-cache"
        if owners == {me}:
            return CachePlace(shared, trusted=trusted)
        return CachePlace(beside / f"index-cache-{me}", shared=shared, trusted=trusted)


class IndexCache:
    def __init__(self, place: CachePlace, say: Callable[[str], None] | None = None) -> None:
        self.place, self._say = place, say
        self.directory = place.directory
        self.notes: list[str] = []  # lines to show to the user

    def load_or_build(self, description: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:
        """Returns the arrays of this description: loaded from a valid cache entry, or else built and stored."""
        text = json.dumps({"format": FORMAT, **description}, sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()[:32]
        shared = self.place.shared
        loaded = None if shared is None else self._load_undamaged(shared, key, text)  # read-only: damage is ignored
        if loaded is not None:
            return loaded
        try:
            loaded = self._load(self.directory, key, text)
        except _DamagedError as damage:
            self.notes.append(f"index cache {damage}; the index is built again")
        if loaded is not None:
            return loaded
        with Claim(_path(self.directory, f".{key}", "claim.lock"), self._say) as claim:
            built = claim.wait_turn(lambda: self._load_undamaged(self.directory, key, text))
            return self._build(key, text, build) if built is None else built

    def _build(self, key: str, text: str, build: Callable[[], Arrays]) -> Arrays:
        arrays = build()
        try:
            self._store(key, text, arrays)
        except StorageError as error:
            if self.place.required:
                raise StorageError(f"--data-cache-path {self.directory}: {error}") from error
            self.notes.append(f"index cache not stored, so the index is rebuilt at every start: {error}")
            return arrays
        if all(array.nbytes <= _MAPPED_FROM for array in arrays.values()):
            return arrays  # small arrays are read, not mapped, so loading them back has no use
        del arrays  # before the stored copy is loaded, so that memory holds one copy
        loaded = None
        try:
            loaded = self._load(self.directory, key, text)  # mapped: the ranks of a machine share one copy
        except _DamagedError as damage:
            self.notes.append(f"index cache {damage}: damaged right after it was written; the index is built in memory")
        return build() if loaded is None else loaded

    def _load_undamaged(self, directory: Path, key: str, text: str) -> Arrays | None:
        try:
            return self._load(directory, key, text)
        except _DamagedError:
            return None

    def _load(self, directory: Path, key: str, text: str) -> Arrays | None:
        marker = _path(directory, key, "description.json")
        try:
            self._check_owner(marker)
            stored = json.loads(marker.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise _DamagedError(f"{marker}: {error}") from None
        if not isinstance(stored, dict) or stored.get("built_from") != text or not isinstance(stored.get("crc"), dict):
            raise _DamagedError(f"{marker}: not the description of this index")
        return {
            name: self._load_array(_path(directory, key, f"{name}.npy"), crc) for name, crc in stored["crc"].items()
        }

    def _check_owner(self, path: Path) -> None:
        found, trusted = path.stat(), self.place.trusted
        if trusted is not None and (found.st_uid not in trusted or found.st_mode & stat.S_IWOTH):
            raise _DamagedError(
                f"{path}: owned by the untrusted user {found.st_uid}, or world-writable; give --data-cache-path if "
                "you trust the directory"
            )

    def _load_array(self, path: Path, crc: int) -> np.ndarray:
        try:
            self._check_owner(path)
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
            self._write_file(_path(self.directory, key, f"{name}.npy"), _npy(array))
        content = {"built_from": text, "crc": {name: _crc(array) for name, array in arrays.items()}}
        self._write_file(_path(self.directory, key, "description.json"), [json.dumps(content).encode()])

    def _write_file(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        # Not synced: checksums detect files torn by a power cut, and thousands of fsyncs would take minutes.
        with writing(path):
            write_atomically(path, chunks, sync=False)


class _DamagedError(Exception):
    """Raised for an entry that exists but cannot be used."""


def _path(directory: Path, key: str, name: str) -> Path:
    return directory / f"{key}-{name}"


def _crc(array: np.ndarray) -> int:
    return zlib.crc32(f"{array.dtype.str}{array.shape}".encode(), zlib.crc32(array_bytes(array)))


def _npy(array: np.ndarray) -> Iterator[bytes | memoryview]:
    header = io.BytesIO()
    np.lib.format.write_array_header_2_0(header, np.lib.format.header_data_from_array_1_0(array))
    yield header.getvalue()
    yield array_bytes(array)


def remove_leftovers(directory: Path) -> None:
    """Removes temporary files and claims of killed builders. They are recognised by an age of more than a day."""
    long_ago = time.time() - _DAY
    for path in directory.glob(".*"):
        if not _ENTRY.fullmatch(target_of(path.name) or "") and not _CLAIM.fullmatch(path.name):
            continue
        with suppress(OSError):  # another process removed it, or we lack the permission
            if path.stat().st_mtime < long_ago:
                path.unlink()


def _private_temporary() -> Path:
    """Returns a temporary directory that no other user can write to."""
    directory = Path(tempfile.gettempdir()) / f"megatron-index-cache-{os.getuid()}"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        if directory.lstat().st_uid == os.getuid() and not directory.is_symlink():
            return directory
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="megatron-index-cache-"))
