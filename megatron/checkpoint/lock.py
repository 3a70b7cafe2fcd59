"""One run at a time writes to a save directory."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint import paths, storage
from megatron.errors import ConfigError

_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass
class DirectoryLock:
    """A lock that the kernel drops with the process, so that a crash never leaves a stale one."""

    path: Path
    descriptor: int | None
    exclusive: bool  # False where the file system knows no locks

    @classmethod
    def acquire(cls, directory: Path, run_id: str) -> DirectoryLock:
        with storage.storage_errors("locking the checkpoint directory", directory):
            storage.make_directory(directory)
            path = directory / paths.LOCK
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(descriptor)
            os.close(descriptor)
            if error.errno in _UNSUPPORTED:
                return cls(path, None, exclusive=False)
            raise ConfigError(
                f"--save {directory}: in use by {holder}; stop that run or give another directory"
            ) from error
        with storage.storage_errors("locking the checkpoint directory", directory):
            _sign(descriptor, run_id)
        return cls(path, descriptor, exclusive=True)

    def release(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def _sign(descriptor: int, run_id: str) -> None:
    text = json.dumps({"run_id": run_id, "host": socket.gethostname(), "pid": os.getpid()}).encode()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text, 0)


def _holder(descriptor: int) -> str:
    try:
        signed = json.loads(os.pread(descriptor, 4096, 0))
        return f"run {signed['run_id']} (pid {signed['pid']} on {signed['host']})"
    except (ValueError, KeyError, TypeError, OSError):
        return "another run"
