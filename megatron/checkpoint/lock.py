"""Lock that lets only one run at a time write to a save directory."""

import json
import os
import socket
import weakref
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint import paths, storage
from megatron.errors import ConfigError
from megatron.utils import durable
from megatron.utils.process import process_exists


@dataclass
class DirectoryLock:
    """The lock of a save directory, held by this process until `release` or its end."""

    descriptor: int | None
    exclusive: bool  # False where the file system has no locks

    @classmethod
    def acquire(cls, directory: Path, run_id: str, flag: str = "--save") -> "DirectoryLock":
        """Locks a directory; `flag` is the setting that names it, for messages."""
        with storage.storage_errors("locking the checkpoint directory", directory):
            durable.make_directory(directory)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(directory / paths.LOCK, flags, 0o644)
            try:
                exclusive = _lock(descriptor, directory, flag)
                _sign(descriptor, run_id)
            except BaseException:
                os.close(descriptor)  # an open descriptor would hold the lock
                raise
        lock = cls(descriptor, exclusive)
        held = weakref.ref(lock)
        os.register_at_fork(after_in_child=lambda: _release(held()))  # else the child's descriptor would hold the lock
        return lock

    def is_of(self, directory: Path) -> bool:
        """True if `directory` is still the locked one, not moved or replaced."""
        if self.descriptor is None:
            return False
        try:
            return os.path.samestat(os.fstat(self.descriptor), (directory / paths.LOCK).stat())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def release(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def _release(lock: DirectoryLock | None) -> None:
    if lock is not None:
        lock.release()


def _lock(descriptor: int, directory: Path, flag: str) -> bool:
    """Takes the lock. Returns False where the file system has no locks. Raises a ConfigError that names the holder."""
    try:
        return durable.try_lock(descriptor)
    except BlockingIOError as error:
        holder = _holder(descriptor, directory / paths.LOCK)
        raise ConfigError(f"{flag} {directory}: in use by {holder}; stop that run or give another directory") from error


def _sign(descriptor: int, run_id: str) -> None:
    text = json.dumps({"run_id": run_id, "host": socket.gethostname(), "pid": os.getpid()}).encode()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text, 0)


def _holder(descriptor: int, path: Path) -> str:
    try:
        signed = json.loads(os.pread(descriptor, 4096, 0))
        holder = f"run {signed['run_id']} (pid {signed['pid']} on {signed['host']})"
        if signed["host"] == socket.gethostname() and not process_exists(signed["pid"]):
            holder += f", which has ended, but a process that it started still runs (`fuser {path}` names it)"
        return holder
    except (ValueError, KeyError, TypeError, OSError, RecursionError):
        return "another run"
