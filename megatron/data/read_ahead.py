"""An iterator that is read by a thread, a few items ahead of whoever uses it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class _End:
    """What the source raised instead of giving an item; StopIteration where it just ended."""

    error: BaseException


class ReadAhead(Iterator[T], Generic[T]):
    """The items of `source` in their order. What it raises is raised where its item would have been.

    Taking a batch from another process is a millisecond of messages to and fro. Here they pass during the step before.
    """

    def __init__(self, source: Iterator[T], *, depth: int) -> None:
        self._ready: queue.SimpleQueue[T | _End] = queue.SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._stopped = threading.Event()
        self._ended: _End | None = None
        # A daemon: the end of the process must not wait for a source that hangs. It holds no reference to self, so
        # that forgetting self is enough to end it.
        arguments = source, self._ready, self._room, self._stopped
        self._thread = threading.Thread(target=_read, args=arguments, name="read-ahead", daemon=True)
        self._thread.start()

    def __next__(self) -> T:
        if self._ended is None:
            item = self._ready.get()
            if not isinstance(item, _End):
                self._room.release()
                return item
            self._ended = item
        raise self._ended.error

    def stop(self, seconds: float) -> None:
        """Ends the thread; waits for it no longer than this, for the source may be in the middle of an item."""
        self._stopped.set()
        self._room.release()
        self._thread.join(seconds)

    def __del__(self) -> None:
        if hasattr(self, "_thread"):
            self.stop(0.0)


def _read(
    source: Iterator[T], ready: queue.SimpleQueue[T | _End], room: threading.Semaphore, stopped: threading.Event
) -> None:
    try:
        while room.acquire() and not stopped.is_set():
            ready.put(next(source))
    except BaseException as error:
        ready.put(_End(error))
