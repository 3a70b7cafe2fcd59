"""Reading ahead in a thread, so that whoever waits for slow input can watch other things as well."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from multiprocessing import Pipe
from typing import Generic, TypeVar

Item = TypeVar("Item")

DEPTH = 2


class ReadAhead(Generic[Item]):
    """`take` does not wait when there is something to receive from `ready`."""

    def __init__(self, items: Iterator[Item], depth: int = DEPTH) -> None:
        self._items = items
        self._taken: deque[Item] = deque()
        self._room = threading.Semaphore(depth)
        self._failure: BaseException | None = None
        self._closed = False
        self.ready, self._signal = Pipe(duplex=False)
        # A daemon: it may be waiting for a pipe that nobody writes when the run ends.
        threading.Thread(target=self._read, daemon=True).start()

    def take(self) -> Item | None:
        """None at the end. What the reading raised is raised here."""
        self.ready.recv_bytes()
        if self._taken:
            self._room.release()
            return self._taken.popleft()
        if self._failure is not None:
            raise self._failure
        return None

    def close(self) -> None:
        """The thread ends with the item that it is reading."""
        self._closed = True
        self._room.release()

    def _read(self) -> None:
        try:
            while True:
                self._room.acquire()
                if self._closed:
                    return
                item = next(self._items, None)
                if item is None:
                    break
                self._taken.append(item)
                del item
                self._signal.send_bytes(b".")
        except BaseException as error:  # handed to whoever takes
            self._failure = error
        self._signal.send_bytes(b".")
