"""Writes a checkpoint's files and hashes them while writing. Errors name the action that failed."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import IO, Any

import xxhash

from megatron.errors import StorageError
from megatron.utils.durable import BlockHasher, Hash
from megatron.utils.task import Task

BLOCK_BYTES = 16 * 2**20
_READ_BYTES = _WRITE_BYTES = 2**20
_SYNC_BYTES = 16 * 2**20

HASHES: Mapping[str, Callable[[], Hash]] = {"xxh3_128": xxhash.xxh3_128, "sha256": hashlib.sha256}
"""Checksum algorithms, by their names in the manifest. They detect damage but not forgery, because they have no key."""
HASH = "xxh3_128"
"""Algorithm of new checkpoints. Before schema 2 it was sha256, which hashes at a tenth of the speed of
memory."""


@dataclass(frozen=True)
class FileRecord:
    """Size and checksums of one file."""

    size: int
    blocks: tuple[str, ...]  # the hash of every 16 MiB block, so that damage can be located


def blocks_in(size: int) -> int:
    return -(-size // BLOCK_BYTES)


Places = Sequence[tuple[int, memoryview]]
"""Pairs (first byte in the file, memory for the bytes from there on), in the file's order."""


def blocks_for(places: Places) -> set[int]:
    """The blocks that have to be read to fill `places`."""
    return {
        block
        for first, memory in places
        if len(memory)
        for block in range(first // BLOCK_BYTES, blocks_in(first + len(memory)))
    }


class FileHasher(BlockHasher):
    def __init__(self, algorithm: str) -> None:
        super().__init__(BLOCK_BYTES, HASHES[algorithm])

    def record(self) -> FileRecord:
        return FileRecord(size=self.size, blocks=self.blocks())


class HashingFile:
    """File that hashes bytes while they are written, so that it need not be read again. A thread syncs the file
    while later bytes are written."""

    def __init__(self, file: IO[bytes], algorithm: str, stop: Event | None = None) -> None:
        self._file, self._stop = file, stop
        self._sync: Task | None = None
        self._unsynced = 0
        self.hasher = FileHasher(algorithm)

    def write(self, data: bytes | memoryview) -> int:
        """Hashes and writes small pieces, so that a piece is still in the CPU's cache when it is written."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _WRITE_BYTES):
            piece = view[start : start + _WRITE_BYTES]
            if self._stop is not None and self._stop.is_set():
                raise OSError(errno.ECANCELED, "the run has ended")
            self.hasher.update(piece)
            written = self._file.write(piece)
            if written != len(piece):
                raise OSError(errno.ENOSPC, f"only {written} of {len(piece)} bytes written")
            self._unsynced += written
            if self._unsynced >= _SYNC_BYTES and (self._sync is None or self._sync.ended):
                self._sync_beside()
        return len(view)

    def _sync_beside(self) -> None:
        self._raise_lost()
        with suppress(RuntimeError):  # if no thread can be started, only `sync` syncs the file
            self._sync, self._unsynced = Task(partial(os.fsync, self._file.fileno())), 0

    def _raise_lost(self) -> None:
        """Raises the error of the thread's sync. The system reports a lost write only once, to the next sync."""
        if self._sync is not None:
            self._sync.result()

    def flush(self) -> None:
        self._file.flush()

    def sync(self) -> None:
        self._raise_lost()
        self._file.flush()
        os.fsync(self._file.fileno())

    def wait(self) -> None:
        """Waits until no thread uses the file."""
        if self._sync is not None:
            self._sync.wait()


def write_durable(
    path: Path, write: Callable[[HashingFile], object], algorithm: str = HASH, stop: Event | None = None
) -> FileRecord:
    """Creates `path`, lets `write` fill it and syncs it; the caller syncs the directory. Raises once `stop` is set."""
    with open(path, "xb") as raw:
        file = HashingFile(raw, algorithm, stop)
        try:
            write(file)
            file.sync()
        finally:
            file.wait()
    return file.hasher.record()


def hash_file(path: Path, algorithm: str = HASH) -> FileRecord:
    hasher = FileHasher(algorithm)
    with open(path, "rb") as file:
        while data := file.read(_READ_BYTES):
            hasher.update(data)
    return hasher.record()


def hash_blocks(
    path: Path, blocks: Sequence[int], algorithm: str, threads: int = 1, into: Places = ()
) -> tuple[str, ...]:
    """Hashes some blocks of a file, in order, and reads only these. The last block may be short. Bytes that have a
    place in `into` are read into that memory and stay there."""
    share = -(-len(blocks) // threads)
    parts = [blocks[start : start + share] for start in range(0, len(blocks), share or 1)]
    if len(parts) < 2:
        return _hash_part(path, algorithm, into, blocks)
    with ThreadPoolExecutor(len(parts)) as pool:
        found = pool.map(partial(_hash_part, path, algorithm, into), parts)
        return tuple(hashed for part in found for hashed in part)


def _hash_part(path: Path, algorithm: str, into: Places, blocks: Sequence[int]) -> tuple[str, ...]:
    """Hashes pieces while they are in the processor's cache. Reading and hashing let other threads run."""
    hasher = FileHasher(algorithm)
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        for run in _consecutive(blocks):
            position = file.seek(run.start * BLOCK_BYTES)
            for memory in _memory_for(position, min(run.stop * BLOCK_BYTES, size), into):
                while len(memory) and (count := file.readinto(memory)):
                    hasher.update(memory[:count])
                    memory = memory[count:]
    return hasher.record().blocks


def _consecutive(blocks: Sequence[int]) -> Iterator[range]:
    start = 0
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or blocks[end] != blocks[end - 1] + 1:
            yield range(blocks[start], blocks[end - 1] + 1)
            start = end


def _memory_for(start: int, stop: int, into: Places) -> Iterator[memoryview]:
    """Yields memory for the bytes from `start` to `stop` of a file, in order: their places, or one small buffer."""
    buffer = memoryview(bytearray(min(_READ_BYTES, max(stop - start, 0))))
    for first, place in [*into, (stop, buffer[:0])]:
        first = min(first, stop)
        while start < first:
            yield buffer[: first - start]
            start += min(first - start, len(buffer))
        end = min(first + len(place), stop)
        while start < end:
            yield (piece := place[start - first : min(end - first, start - first + _READ_BYTES)])
            start += len(piece)


def free_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free


def canonical_json(value: Mapping[str, Any]) -> bytes:
    """Serialises a value in the only form that is accepted: a file that differs in any byte was changed."""
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=True, allow_nan=False) + "\n").encode()


@contextmanager
def storage_errors(doing: str, path: Path) -> Iterator[None]:
    """Turns an OSError into a StorageError that names the action and the path."""
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
    return (
        f"{doing} failed at {place}: {reason}; earlier checkpoints are untouched. Make sure that this path has free "
        "space and is writable, or give another directory"
    )
