"""Opens data files: checks their kind, maps or reads them, and raises the limit on open files."""

import os
import resource
import stat
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron.errors import ConfigError, DataError
from megatron.utils.durable import try_lock, writing

_SMALL = 1 << 20


def regular_file_size(path: Path, setting: str) -> int:
    """Returns the size of a regular file. Rejects a pipe or a device, which could block."""
    try:
        info = path.stat()
    except FileNotFoundError:
        raise ConfigError(f"{setting}: {path} does not exist; check the path") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be opened ({error.strerror}); check the path and its permissions") from error
    if not stat.S_ISREG(info.st_mode):
        raise DataError(f"{path}: not a regular file; copy the data to a file, and give that file")
    return info.st_size


def map_or_read(path: Path, size: int) -> np.ndarray:
    """Returns the bytes of a whole file: mapped if large, else read, because a process has a limit on its maps."""
    return np.fromfile(path, dtype=np.uint8) if size <= _SMALL else _mapped(path, np.dtype(np.uint8))


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    return np.memmap(path, mode="r", dtype=dtype).view(np.ndarray)  # an ndarray slices faster than a memmap


def map_tokens(path: Path, dtype: np.dtype, size: int) -> np.ndarray:
    """Maps a whole .bin read-only; `size` is its size when it was opened."""
    try:
        mapped = _mapped(path, dtype)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: removed or truncated while in use ({error}); restore it and resume") from error
    if mapped.nbytes != size:
        raise DataError(f"{path}: changed while in use, from {size} to {mapped.nbytes} bytes; restore it and resume")
    return mapped


def is_mapped(path: Path) -> bool:
    """True if `map_or_read` would map this file. False for a missing file, which opening it reports."""
    try:
        return path.stat().st_size > _SMALL
    except OSError:
        return False


def allow_files_for_sources(sources: int, held: int) -> None:
    """Raises the limit on open files. The sources hold at least `held` descriptors; a source with a large index holds
    up to a dozen. The usual limit of 1024 is too low for a blend of thousands of sources."""
    wanted, needed = max(512 + 12 * sources, 256 + held), 256 + held
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if limit < needed:
        raise ConfigError(
            f"{sources} data sources need {needed} open files, but this process may open {hard}; "
            f"raise the limit (ulimit -n) or merge sources with tools/merge_datasets.py"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


def array_bytes(array: np.ndarray) -> memoryview:
    """Returns the bytes of an array, to write or hash without a copy."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def open_alone(path: Path) -> BinaryIO:
    """Opens for writing under a lock, so that two runs cannot write one output. Overwrites the file of a killed run."""
    if not path.parent.is_dir():
        raise ConfigError(f"output {path.parent}: no such directory; create it or choose another --output-prefix")
    with writing(path):
        stream = open(path, "ab")  # not "wb": a live run may own the file  # noqa: SIM115
    try:
        try_lock(stream.fileno())
        held = os.fstat(stream.fileno())
        if not path.exists() or not os.path.samestat(held, path.stat()):
            raise BlockingIOError  # the other run finished between our open and our lock
    except BlockingIOError:
        stream.close()
        raise ConfigError(
            f"output {path}: another process is writing it; wait until it ends, or choose another prefix"
        ) from None
    except OSError:
        pass  # locks do not work here; the check for an existing output remains
    stream.truncate(0)
    return stream
