"""What has been read of a file, and made use of, before its bytes are hashed. Only if the very same bytes of the very
same file are hashed does the hash say anything about it: the file may be written or replaced meanwhile, and a disk may
give other bytes when it is asked again."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable

FileId = tuple[int, int, int]
"""As long as a file is open or mapped, no other one has it, nor has the file itself in another length."""


def file_id(status: os.stat_result) -> FileId:
    return status.st_dev, status.st_ino, status.st_size


class ChangedFileError(Exception):
    """What is hashed is not what was read before."""


class Seen:
    """Parts of a file, and which file it was."""

    def __init__(self, file: FileId | None, parts: Iterable[tuple[int, bytes]]) -> None:
        """`parts`: (the first byte in the file, the bytes). They may overlap. `file` is None if nothing has
        been read."""
        self._file, self._read_twice_alike = file, True
        self._parts: list[tuple[int, bytearray]] = []  # in order, none overlaps another
        for start, data in sorted(parts):
            self._add(start, data)
        self._stops = [start + len(data) for start, data in self._parts]

    def _add(self, start: int, data: bytes) -> None:
        if not self._parts or start > (stop := self._parts[-1][0] + len(self._parts[-1][1])):
            self._parts.append((start, bytearray(data)))
            return
        first, before = self._parts[-1]
        if not data.startswith(before[start - first :]) and not before.startswith(data, start - first):
            self._read_twice_alike = False
        before += data[stop - start :]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return [(start, start + len(data)) for start, data in self._parts]

    def check_file(self, found: FileId) -> None:
        if (self._file is not None and found != self._file) or not self._read_twice_alike:
            raise ChangedFileError

    def check(self, start: int, data: memoryview) -> None:
        """Compares what the file has from `start` on."""
        for number in range(bisect_right(self._stops, start), len(self._parts)):
            first, seen = self._parts[number]
            if first >= start + len(data):
                return
            low, high = max(first, start), min(first + len(seen), start + len(data))
            if seen[low - first : high - first] != bytes(data[low - start : high - start]):
                raise ChangedFileError
