"""A stream over bytes that a function reads range by range."""

import io
from collections.abc import Callable
from typing import Any


class RangedFile(io.RawIOBase):
    """A seekable stream of `size` bytes; `read(start, stop)` returns a range of them."""

    def __init__(self, size: int, read: Callable[[int, int], bytes]) -> None:
        self._size, self._read = size, read
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("a position before the beginning")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._size - self._position))
        if count:
            buffer[:count] = self._read(self._position, self._position + count)
            self._position += count
        return count
