"""Files that are either whole under their final name, or not there at all."""

from __future__ import annotations

import errno
import os
import resource
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from megatron.errors import ConfigError, DataError, StorageError

_SMALL = 1 << 20


def regular_file_size(path: Path, setting: str) -> int:
    """Size of a regular file. A pipe or a device is refused before anybody waits on it."""
    try:
        info = path.stat()
    except FileNotFoundError:
        raise ConfigError(f"{setting}: {path} does not exist") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be opened ({error.strerror}); check the path and its permissions") from error
    if not stat.S_ISREG(info.st_mode):
        raise DataError(f"{path}: not a regular file; copy the data to a file and name that")
    return info.st_size


def map_or_read(path: Path, size: int, dtype: np.dtype | type = np.uint8) -> np.ndarray:
    """A read-only view of a whole file: mapped when it is large; thousands of small ones would use up the maps that
    a process may have. (Without the memmap subclass slicing is fast.)"""
    if size <= _SMALL:
        return np.fromfile(path, dtype=dtype)
    return np.memmap(path, mode="r", dtype=dtype).view(np.ndarray)


def is_mapped(path: Path) -> bool:
    """Whether `map_or_read` would map this file. A file that is not there is found out elsewhere."""
    try:
        return path.stat().st_size > _SMALL
    except OSError:
        return False


def allow_open_files(sources: int, held: int) -> None:
    """A mapped file holds a descriptor, and the usual limit of 1024 is too small for a blend of thousands: these
    sources hold so many at least, and up to a dozen each with large indices."""
    wanted, needed = max(512 + 12 * sources, 256 + held), 256 + held
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if limit < needed:
        raise ConfigError(
            f"{sources} data sources need {needed} open files, and this process may have {hard}; "
            f"raise the limit (ulimit -n) or merge sources with tools/merge_datasets.py"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


def as_bytes(array: np.ndarray) -> memoryview:
    """The memory of an array, to write or to hash without a copy."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def fsync_directory(directory: Path) -> None:
    """Makes a rename in it survive a power cut. Some file systems cannot sync a directory: that is no error."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def write_synced(path: Path, chunks: Iterable[bytes | memoryview], *, sync: bool = True) -> None:
    with open(path, "wb") as stream:
        for chunk in chunks:
            stream.write(chunk)
        stream.flush()
        if sync:
            os.fsync(stream.fileno())


def write_atomically(path: Path, chunks: Iterable[bytes | memoryview], *, sync: bool = True) -> None:
    """Written beside under a name of its own, then renamed into place; on any failure nothing is left."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        write_synced(temporary, chunks, sync=sync)
        temporary.replace(path)
        if sync:
            fsync_directory(path.parent)
    except OSError as error:
        raise storage_error(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def storage_error(path: Path, error: OSError) -> StorageError:
    hint = "free some space or choose another directory" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    hint = hint or "check the directory and its permissions"
    return StorageError(f"{path}: cannot be written ({error.strerror or error}); {hint}")
