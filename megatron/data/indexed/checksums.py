"""Checksums of each block of a file. They locate damage, and all cores can verify blocks in parallel.

The hash is sha256, as in a checkpoint's manifest. Blocks have fixed offsets, so the list does not depend on how the
file was written.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

from megatron.data.indexed.files import regular_file_size
from megatron.data.indexed.index_file import AGAIN
from megatron.errors import DataError
from megatron.utils.durable import BlockHasher
from megatron.utils.process import usable_cpus

T = TypeVar("T")

ALGORITHM = "sha256"
BLOCK_BYTES = 64 << 20
_READ_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class FileChecksums:
    """The checksums of one file, as stored in a record. Invalid ones raise ValueError."""

    algorithm: str = ALGORITHM
    block_bytes: int = BLOCK_BYTES
    size: int
    blocks: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.algorithm != ALGORITHM:
            raise ValueError(f"algorithm {self.algorithm!r:.60}; only {ALGORITHM} is known")
        if self.size < 0 or self.block_bytes < 8 or self.block_bytes % 8:
            raise ValueError(f"size {self.size} or block_bytes {self.block_bytes} is impossible")
        if not all(len(block) == 64 for block in self.blocks):
            raise ValueError("blocks contains a text that is not a checksum of 64 digits")
        if len(self.blocks) != -(-self.size // self.block_bytes):
            raise ValueError(
                f"{len(self.blocks)} checksums, but {self.size} bytes in blocks of {self.block_bytes} bytes have "
                f"{-(-self.size // self.block_bytes)}"
            )

    @classmethod
    def of(cls, hasher: BlockHasher) -> "FileChecksums":
        return cls(size=hasher.size, blocks=hasher.blocks(), block_bytes=hasher.block_bytes)


def checksums_of(path: Path, *, block_bytes: int = BLOCK_BYTES) -> FileChecksums:
    """Computes the checksums of a file by reading it whole."""
    size = regular_file_size(path, "data file")
    numbers = range(-(-size // block_bytes))
    with mapped_blocks(path, numbers, lambda file, number: _digest(file, number * block_bytes, block_bytes)) as blocks:
        return FileChecksums(size=size, blocks=tuple(blocks), block_bytes=block_bytes)


def verify_blocks(path: Path, expected: FileChecksums) -> None:
    """Verifies the whole file with all cores."""
    refuse_damage(path, checksums_of(path, block_bytes=expected.block_bytes), expected)


def refuse_damage(path: Path, found: FileChecksums, expected: FileChecksums) -> None:
    """Raises DataError at the first difference."""
    if found.size != expected.size:
        raise DataError(f"{path}: {found.size} bytes, but {expected.size} were written; {AGAIN}")
    for number, (block, wanted) in enumerate(zip(found.blocks, expected.blocks, strict=True)):
        if block != wanted:
            start = number * expected.block_bytes
            stop = min(start + expected.block_bytes, expected.size)
            raise DataError(
                f"{path}: damaged: block {number}, bytes {start} to {stop}, is not what was written "
                f"({ALGORITHM} differs); {AGAIN}"
            )


@contextmanager
def mapped_blocks(path: Path, numbers: Sequence[int], look_at: Callable[[int, int], T]) -> Iterator[Iterator[T]]:
    """Yields an iterator over the results of `look_at(descriptor, number)` for each block, computed on all CPUs.

    A context manager, so that its threads end with the context even after an error. A plain generator would join them
    when it is garbage-collected. That can deadlock: the interrupted code may hold a lock that an ending thread needs.
    """
    threads = usable_cpus()
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        with ThreadPoolExecutor(threads) as pool:
            firsts = range(0, len(numbers), 2 * threads)
            calls = (pool.map(partial(look_at, descriptor), numbers[first : first + 2 * threads]) for first in firsts)
            yield chain.from_iterable(calls)
    finally:
        os.close(descriptor)


def _digest(descriptor: int, position: int, size: int) -> str:
    digest, stop = hashlib.sha256(), position + size
    while position < stop:
        part = os.pread(descriptor, min(_READ_BYTES, stop - position), position)
        if not part:
            break
        digest.update(part)
        position += len(part)
    return digest.hexdigest()
