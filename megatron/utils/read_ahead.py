"""An iterator whose items a thread prefetches."""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class _End:
    """Last item of the thread: the error of the source, or StopIteration at the source's end."""

    error: BaseException


class ReadAhead(Iterator[T], Generic[T]):
    """The items of `source` in order, up to `depth` of them prefetched. Its errors are raised in place of items.

    While `next` would not block, `ready` is readable, so one `multiprocessing.connection.wait` can watch it together
    with other connections.
    """

    def __init__(self, source: Iterator[T], *, depth: int) -> None:
        self._items: queue.SimpleQueue[T | _End] = queue.SimpleQueue()
        self.ready, signal = Pipe(duplex=False)
        # Not a semaphore: __del__ may run wherever garbage is collected, in the thread too, while it holds a lock.
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(depth):
            self._room.put(None)
        self._stopped = threading.Event()
        self._ended: _End | None = None
        # A daemon, so that a source that hangs does not keep the process alive. The thread holds no reference to self:
        # it ends when self is garbage.
        arguments = source, self._items, signal, self._room, self._stopped
        self._thread = threading.Thread(target=_read, args=arguments, name="read-ahead", daemon=True)
        self._thread.start()

    def __next__(self) -> T:
        if self._ended is None:
            self.ready.recv_bytes()
            item = self._items.get()
            if not isinstance(item, _End):
                self._room.put(None)
                return item
            self._ended = item
        raise self._ended.error

    def wait(self, seconds: float) -> bool:
        """Waits for at most `seconds`. Returns whether `next` would not block."""
        return self._ended is not None or self.ready.poll(seconds)

    def stop(self, seconds: float) -> None:
        """Ends the thread. Waits for it no longer than `seconds`, because the source may be producing an item."""
        self._end()
        self._thread.join(seconds)

    def _end(self) -> None:
        self._stopped.set()
        self._room.put(None)

    def __del__(self) -> None:
        if hasattr(self, "_thread"):
            self._end()


def _read(
    source: Iterator[T],
    items: queue.SimpleQueue[T | _End],
    signal: Connection,
    room: queue.SimpleQueue[None],
    stopped: threading.Event,
) -> None:
    ended = False
    while not ended:
        room.get()
        if stopped.is_set():
            return
        item: T | _End
        try:
            item = next(source)
        except BaseException as error:
            item, ended = _End(error), True
        items.put(item)
        del item  # or this thread would keep an item alive after it was taken
        try:
            signal.send_bytes(b".")
        except OSError:
            return  # the reader has closed its end
