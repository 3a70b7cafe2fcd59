"""A mapped file and its parts, and the reading of small parts of it."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.seen import FileId, Seen, file_id
from megatron.errors import CheckpointError


class Reads:
    """Small parts of a file, copied. What the disk cannot read is an OSError; touched in the mapping, it would be the
    end of the process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def part(self, start: int, length: int) -> bytes:
        with open(self.path, "rb", buffering=0) as file:
            return os.pread(file.fileno(), length, start)

    def check_path(self) -> None:
        """Fails if the path leads to another file by now."""

    def close(self) -> None:
        """Nothing is open."""


class NotedReads(Reads):
    """Keeps what is read, so that it can be compared with what is hashed. The file stays open until `close`; parts
    that are read later are read of the same file, or not at all."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._parts: list[tuple[int, bytes]] = []
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        self._id = file_id(os.fstat(self._file.fileno()))

    def part(self, start: int, length: int) -> bytes:
        if self._file.closed:
            with open(self.path, "rb", buffering=0) as file:
                self._check(file_id(os.fstat(file.fileno())))
                return os.pread(file.fileno(), length, start)
        data = os.pread(self._file.fileno(), length, start)
        self._parts.append((start, data))
        return data

    def check_path(self) -> None:
        self._check(file_id(self.path.stat()))

    def _check(self, found: FileId) -> None:
        if found != self._id:
            raise CheckpointError(f"{self.path} was replaced while it was read")

    def close(self) -> None:
        self._file.close()

    def seen(self) -> Seen:
        return Seen(self._id, self._parts)


@dataclass(frozen=True)
class Bytes:
    """A part of a mapped file."""

    reads: Reads
    whole: Tensor
    start: int
    length: int

    @staticmethod
    def of_file(path: Path, reads: Reads | None = None) -> Bytes:
        reads = reads or Reads(path)
        try:
            size = path.stat().st_size
            whole = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8) if size else torch.empty(0)
            reads.check_path()
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{path} cannot be read ({str(error).splitlines()[0][:200]})") from error
        return Bytes(reads, whole, 0, size)

    @property
    def path(self) -> Path:
        return self.reads.path

    def part(self, start: int, length: int) -> Bytes:
        if start < 0 or length < 0 or start + length > self.length:
            raise CheckpointError(
                f"{self.path} is too short: bytes {start} to {start + length} of {self.length} are asked for"
            )
        return Bytes(self.reads, self.whole, self.start + start, length)

    def read(self) -> bytes:
        return self.reads.part(self.start, self.length)

    def view(self) -> memoryview:
        """The mapped bytes, which are read when they are touched."""
        return self.whole[self.start : self.start + self.length].numpy().data

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """A view of the file, or a copy if it lies at an address that its type cannot have. It has a storage of its
        own, as torch's loader gives it: torch's generators take their state from the beginning of a storage."""
        storage = self.whole.untyped_storage()[self.start : self.start + self.length]
        raw = torch.empty(0, dtype=torch.uint8).set_(storage)
        return (raw if self.start % dtype.itemsize == 0 else raw.clone()).view(dtype)


class Window(io.RawIOBase):
    """A part of a mapped file as a stream."""

    def __init__(self, data: Bytes) -> None:
        self._data = data
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._data.length}[whence]
        if base + offset < 0:
            raise OSError("a position before the beginning")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), max(self._data.length - self._position, 0))
        buffer[:count] = self._data.part(self._position, count).read() if count else b""
        self._position += count
        return count
