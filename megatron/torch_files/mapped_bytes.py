"""Memory-mapped files, and parts of them."""

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
            raise CheckpointError(
                f"{path} cannot be read ({str(error).splitlines()[0][:200]}); check that it exists and is readable"
            ) from error
        return Bytes(path, whole, 0, size)

    def part(self, start: int, length: int) -> "Bytes":
        if start < 0 or length < 0 or start + length > self.length:
            raise CheckpointError(
                f"{self.path} is too short: bytes {start} to {start + length} are needed, but only {self.length} are "
                "there; copy or download the file again"
            )
        return Bytes(self.path, self.whole, self.start + start, length)

    def read(self) -> bytes:
        """Returns a copy of the bytes. A disk error raises an OSError here; on access to mapped memory it would end the
        process."""
        with open(self.path, "rb", buffering=0) as file:
            return os.pread(file.fileno(), self.length, self.start)

    def stream(self) -> io.BufferedReader:
        return io.BufferedReader(RangedFile(self.length, lambda start, stop: self.part(start, stop - start).read()))

    def view(self) -> memoryview:
        """The mapped bytes, which are read from disk on access."""
        return self.whole[self.start : self.start + self.length].numpy().data

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """Returns a view of the file, or a copy if the address is not aligned for the dtype. Each tensor has its own
        storage, as from torch's loader, because torch's generators read their state from the start of a storage."""
        storage = self.whole.untyped_storage()[self.start : self.start + self.length]
        raw = torch.empty(0, dtype=torch.uint8).set_(storage)
        return (raw if self.start % dtype.itemsize == 0 else raw.clone()).view(dtype)
