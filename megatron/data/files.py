"""Files that are either whole under their final name, or not there at all."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from megatron.errors import ConfigError, DataError, StorageError


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
