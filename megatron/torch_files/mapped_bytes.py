"""A mapped file and its parts, and the reading of small parts of it."""

import io
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.errors import CheckpointError
from megatron.utils.ranged_file import RangedFile


@dataclass(frozen=True)
class Bytes:
    """A part of a mapped file."""

    path: Path
    whole: Tensor
    start: int
    length: int

    @staticmethod
    def of_file(path: Path) -> "Bytes":
        try:
            size = path.stat().st_size
            whole = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8) if size else torch.empty(0)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{path} cannot be read ({str(error).splitlines()[0][:200]})") from error
        return Bytes(path, whole, 0, size)

    def part(self, start: int, length: int) -> "Bytes":
        if start < 0 or length < 0 or start + length > self.length:
            raise CheckpointError(
                f"{self.path} is too short: bytes {start} to {start + length} of {self.length} are asked for"
            )
        return Bytes(self.path, self.whole, self.start + start, length)

    def read(self) -> bytes:
        """A copy. What the disk cannot read is an OSError here; touched in the mapping, it ends the process."""
        with open(self.path, "rb", buffering=0) as file:
            return os.pread(file.fileno(), self.length, self.start)

    def stream(self) -> io.BufferedReader:
        return io.BufferedReader(RangedFile(self.length, lambda start, stop: self.part(start, stop - start).read()))

    def view(self) -> memoryview:
        """The mapped bytes, which are read when they are touched."""
        return self.whole[self.start : self.start + self.length].numpy().data

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """A view of the file, or a copy if it lies at an address that its type cannot have. It has a storage of its
        own, as torch's loader gives it: torch's generators take their state from the beginning of a storage."""
        storage = self.whole.untyped_storage()[self.start : self.start + self.length]
        raw = torch.empty(0, dtype=torch.uint8).set_(storage)
        return (raw if self.start % dtype.itemsize == 0 else raw.clone()).view(dtype)
