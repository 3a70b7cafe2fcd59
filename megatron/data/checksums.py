"""Checksums of a file in blocks, so that damage has an address, and all cores can look for it.

sha256, as in a checkpoint's manifest. The blocks are cut by offset in the file: a file has one list of checksums,
however it was written.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.data.files import regular_file_size
from megatron.errors import DataError

ALGORITHM = "sha256"
BLOCK_BYTES = 64 << 20
_READ_BYTES = 4 << 20
_AGAIN = "copy the file again, or run tools/preprocess_data.py again"


class BlockChecksums:
    """Takes a file's bytes in order, in pieces of any size."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self.block_bytes, self.size = block_bytes, 0
        self._block = hashlib.sha256()
        self._blocks: list[str] = []

    def update(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            part = view[: self.block_bytes - self.size % self.block_bytes]
            self._block.update(part)
            self.size += len(part)
            view = view[len(part) :]
            if self.size % self.block_bytes == 0:
                self._blocks.append(self._block.hexdigest())
                self._block = hashlib.sha256()

    def finish(self) -> list[str]:
        """Of all blocks so far, the last of which may be short."""
        begun = self.size % self.block_bytes != 0
        return [*self._blocks, self._block.hexdigest()] if begun else list(self._blocks)

    def checksums(self) -> FileChecksums:
        return FileChecksums(size=self.size, blocks=tuple(self.finish()), block_bytes=self.block_bytes)


@dataclass(frozen=True, kw_only=True)
class FileChecksums:
    """What a record keeps of one file."""

    size: int
    blocks: tuple[str, ...]
    block_bytes: int = BLOCK_BYTES
    algorithm: str = ALGORITHM

    def as_json(self) -> dict[str, Any]:
        return {
            "algorithm": self.algorithm,
            "block_bytes": self.block_bytes,
            "size": self.size,
            "blocks": list(self.blocks),
        }

    @classmethod
    def from_json(cls, content: Any) -> FileChecksums:
        """A ValueError says what is wrong with it."""
        if not isinstance(content, dict):
            raise ValueError("not an object")
        size, block_bytes, blocks = (content.get(name) for name in ("size", "block_bytes", "blocks"))
        if content.get("algorithm") != ALGORITHM:
            raise ValueError(f"algorithm {content.get('algorithm')!r}, and only {ALGORITHM} is known")
        if type(size) is not int or type(block_bytes) is not int or size < 0 or block_bytes < 8 or block_bytes % 8:
            raise ValueError(f"size {size!r} in blocks of {block_bytes!r} bytes")
        if not isinstance(blocks, list) or not all(isinstance(block, str) and len(block) == 64 for block in blocks):
            raise ValueError("blocks is not a list of checksums")
        if len(blocks) != -(-size // block_bytes):
            raise ValueError(f"{len(blocks)} blocks of {block_bytes} bytes for {size} bytes")
        return cls(size=size, blocks=tuple(blocks), block_bytes=block_bytes)


def checksums_of(path: Path, *, block_bytes: int = BLOCK_BYTES) -> FileChecksums:
    """Reads the whole file."""
    size = regular_file_size(path, "data file")
    numbers = range(-(-size // block_bytes))
    blocks = tuple(block for _, block in _digests(path, numbers, block_bytes))
    return FileChecksums(size=size, blocks=blocks, block_bytes=block_bytes)


def verify_blocks(path: Path, expected: FileChecksums, *, on_block: Callable[[int], None] | None = None) -> None:
    """Reads the whole file with all cores and names the first damage. `on_block` is told the bytes of each block."""
    size = regular_file_size(path, "data file")
    if size != expected.size:
        raise DataError(f"{path}: {size} bytes, and {expected.size} were written; {_AGAIN}")
    for number, block in _digests(path, range(len(expected.blocks)), expected.block_bytes):
        if block != expected.blocks[number]:
            raise damaged_block(path, number, expected)
        if on_block is not None:
            on_block(min(expected.block_bytes, size - number * expected.block_bytes))


def damaged_block(path: Path, number: int, expected: FileChecksums) -> DamagedBlockError:
    start = number * expected.block_bytes
    return DamagedBlockError(path, number, start, min(start + expected.block_bytes, expected.size))


class DamagedBlockError(DataError):
    """A block that is not what was written."""

    def __init__(self, path: Path, number: int, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        super().__init__(
            f"{path}: damaged: block {number}, bytes {start} to {stop}, is not what was written "
            f"({ALGORITHM} differs); {_AGAIN}"
        )


def _digests(path: Path, numbers: Sequence[int], block_bytes: int) -> Iterator[tuple[int, str]]:
    """In order; hashing lets go of the interpreter's lock, so threads are enough."""
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        with ThreadPoolExecutor(threads) as pool:
            for first in range(0, len(numbers), 2 * threads):
                group = numbers[first : first + 2 * threads]
                found = pool.map(lambda number: _digest(descriptor, number * block_bytes, block_bytes), group)
                yield from zip(group, found, strict=True)
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
