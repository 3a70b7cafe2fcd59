"""Durable files: a file is complete or absent, and survives a power cut once the call that wrote it has returned.

All fsync, atomic replacement, file locks and block checksums are here. Functions raise the OSError of the disk;
`writing` turns it into a StorageError for callers that have nothing to add.
"""

import errno
import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from megatron.errors import StorageError

# Errors of a file system that cannot sync a directory (some network and FUSE mounts), or that has no locks.
_NO_DIRECTORY_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_TEMPORARY = re.compile(r"\.(.+)\.\d+-[0-9a-f]{8}\.tmp")


# ---------------------------------------------------------------- fsync


def fsync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_directory(path: Path) -> None:
    """Makes the names in `path` survive a power cut; a no-op on a file system that cannot sync a directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(descriptor)


def fsync_tree(root: Path) -> None:
    """Syncs every file and directory below `root`, the deepest first."""
    for directory, _, files in os.walk(root, topdown=False):
        for name in sorted(files):
            fsync_file(Path(directory) / name)
        fsync_directory(Path(directory))


# ---------------------------------------------------------------- names


def make_directory(path: Path) -> None:
    """`mkdir -p` with every new name synced in its parent."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir()
        fsync_directory(directory.parent)


def rename(source: Path, target: Path) -> None:
    """Renames `source` and syncs the new name. Raises an OSError if `target` exists."""
    if target.exists():
        raise OSError(errno.EEXIST, "the target exists already", str(target))
    source.rename(target)
    fsync_directory(target.parent)


# ---------------------------------------------------------------- writing


def write_synced(path: Path, chunks: Iterable[bytes | memoryview], *, sync: bool = True) -> None:
    with open(path, "wb") as stream:
        for chunk in chunks:
            stream.write(chunk)
        stream.flush()
        if sync:
            os.fsync(stream.fileno())


def write_atomically(
    path: Path, chunks: Iterable[bytes | memoryview], *, sync: bool = True, temporary: Path | None = None
) -> None:
    """Writes a temporary file in the same directory and renames it to `path`; on any failure removes it.

    Large files get a fixed `temporary`, so that the next writer overwrites what a killed one left.
    """
    temporary = temporary or temporary_of(path)
    try:
        write_synced(temporary, chunks, sync=sync)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if sync:
        fsync_directory(path.parent)


def write_once(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Writes atomically unless the file exists: the first of several writers wins."""
    temporary = temporary_of(path)
    try:
        write_synced(temporary, chunks)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return
        except OSError:  # a file system without links: the last writer wins
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)


def temporary_of(path: Path) -> Path:
    """A name beside `path` that no other writer uses."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def target_of(temporary: str) -> str | None:
    """Name of the file that a temporary one was to become; None if `temporary` is not the name of one."""
    match = _TEMPORARY.fullmatch(temporary)
    return match[1] if match else None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError into a StorageError that names `path` and the fix."""
    try:
        yield
    except OSError as error:
        raise storage_error(path, error) from error


def storage_error(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path}: cannot be written ({error.strerror or error}); {fix_of(error)}")


def fix_of(error: OSError) -> str:
    """Suggests a fix for a failed write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space or choose another directory"
    if error.errno == errno.EROFS:
        return "the file system is read-only: choose another directory"
    return "check the directory and its permissions"


# ---------------------------------------------------------------- locks


def try_lock(descriptor: int) -> bool:
    """Takes an exclusive lock that the kernel drops with the process, so a crash never leaves a stale one.

    Returns False where the file system has no locks. Raises BlockingIOError if another process has the lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


# ---------------------------------------------------------------- checksums


def hash_of_files(folder: Path, files: Iterable[Path]) -> str:
    """sha256 of the files' contents and of their names within `folder`, in the order of their paths."""
    digest = hashlib.sha256()
    for path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


class Hash(Protocol):
    """Hash object of hashlib or xxhash."""

    def update(self, data: memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class BlockHasher:
    """Hashes every block of a stream that comes in pieces of any size, so that damage can be located."""

    def __init__(self, block_bytes: int, new: Callable[[], Hash] = hashlib.sha256) -> None:
        self.block_bytes, self.size = block_bytes, 0
        self._new, self._block = new, new()
        self._blocks: list[str] = []

    def update(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            part = view[: self.block_bytes - self.size % self.block_bytes]
            self._block.update(part)
            self.size += len(part)
            view = view[len(part) :]
            if self.size % self.block_bytes == 0:
                self._blocks.append(self._block.hexdigest())
                self._block = self._new()

    def blocks(self) -> tuple[str, ...]:
        """Returns the hashes of all blocks so far; the last block may be short."""
        partial = self.size % self.block_bytes != 0
        return (*self._blocks, self._block.hexdigest()) if partial else tuple(self._blocks)
