"""Elects the process that builds an index: one per file system, for any number of ranks.

A claim is a file lock. The operating system releases it when its holder exits or is killed, so no process waits for a
dead one. On a file system without locks every process builds, and the files are equal.
"""

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from megatron.utils.durable import try_lock

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 2.0  # seconds between two checks; a thousand ranks check 500 times a second
_SAID_EVERY = 30.0  # seconds
_ENDED = "ended"

Found = TypeVar("Found")


class Claim:
    """Context manager for a claim. This process must build the index if `wait_turn` returns None."""

    def __init__(self, path: Path, say: Callable[[str], None] | None = None) -> None:
        self._path, self._say = path, say
        self._descriptor: int | None = None
        self._held = False

    def __enter__(self) -> "Claim":
        with suppress(OSError):  # if the directory cannot be written, storing the index reports it
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._descriptor = os.open(self._path, flags, 0o644)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._descriptor is None:
            return
        if self._held:
            self._sign(_ENDED)
            with suppress(OSError):  # waiting processes have the file open; later ones find the index
                self._path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def wait_turn(self, find: Callable[[], Found | None]) -> Found | None:
        """Returns the result of `find` once another process has built the index; None if this process must build."""
        pause, began, said = _FIRST_PAUSE, time.monotonic(), time.monotonic()
        while self._descriptor is not None and not self._taken(self._descriptor):
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)
            if (found := find()) is not None:
                return found
            now = time.monotonic()
            if self._say is not None and now - said >= _SAID_EVERY:
                said = now
                whom = self._signature() or "another process"
                self._say(f"data: waiting for {whom} to build an index ({now - began:.0f} s) ...")
        return find()

    def _taken(self, descriptor: int) -> bool:
        """Returns True if no other process is building. If an earlier builder could not store its index, every waiting
        process builds its own copy at once."""
        try:
            self._held = try_lock(descriptor)
        except BlockingIOError:
            return False
        if self._signature() == _ENDED:
            os.close(descriptor)
            self._descriptor, self._held = None, False
        else:
            self._sign(f"process {os.getpid()} on {socket.gethostname()}")
        return True

    def _sign(self, text: str) -> None:
        assert self._descriptor is not None
        with suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, text.encode(), 0)

    def _signature(self) -> str:
        """Returns the text that the holder of the claim wrote into the file; empty if nothing was written yet."""
        assert self._descriptor is not None
        with suppress(OSError, UnicodeDecodeError):
            return os.pread(self._descriptor, 300, 0).decode()
        return ""
