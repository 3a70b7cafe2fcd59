"""Index of a dataset being written. It grows on disk, so memory stays constant."""

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from megatron.data.indexed.files import array_bytes
from megatron.data.indexed.index_file import HEADER, LEGACY_MAGIC, MAGIC, VERSION, dtype_code
from megatron.data.indexed.legacy import HEADER as LEGACY_HEADER
from megatron.utils.durable import write_synced

_BLOCK = 1 << 17  # entries per block; several copies exist while they are summed


class GrowingIndex:
    """Sequence lengths in one file, sequences per document in another; both little-endian int32."""

    def __init__(self, lengths: IO[bytes], counts: IO[bytes]) -> None:
        self._lengths, self._counts = lengths, counts
        self.sequences = lengths.seek(0, io.SEEK_END) // 4
        self.documents = counts.seek(0, io.SEEK_END) // 4

    def add(self, lengths: np.ndarray, counts: np.ndarray) -> None:
        self._lengths.write(array_bytes(lengths.astype("<i4", copy=False)))
        self._counts.write(array_bytes(counts.astype("<i4", copy=False)))
        self.sequences += len(lengths)
        self.documents += len(counts)

    def write(self, path: Path, dtype: np.dtype, impl: str = "mmap") -> None:
        """Writes the .idx in the format of mmap, or in the older one that lazy and cached share."""
        write_synced(path, self.index_bytes(dtype) if impl == "mmap" else self.legacy_index_bytes(dtype))

    def index_bytes(self, dtype: np.dtype) -> Iterator[bytes | memoryview]:
        """Yields the content of the .idx file. Reads the lengths twice: for the lengths and for the offsets."""
        yield HEADER.pack(MAGIC, VERSION, dtype_code(dtype), self.sequences, self.documents + 1)
        for block in _blocks(self._lengths):
            yield array_bytes(block)
        end = 0
        for block in _blocks(self._lengths):
            sums = np.cumsum(block.astype(np.int64) * dtype.itemsize)
            yield np.concatenate([[end], sums[:-1] + end]).astype("<i8", copy=False).tobytes()
            end += int(sums[-1])
        for first in _running_sums(_blocks(self._counts)):  # sequence of each document
            yield first.tobytes()

    def legacy_index_bytes(self, dtype: np.dtype) -> Iterator[bytes]:
        """Yields the content in the older format, where each sequence is a one-dimensional item."""
        items, sizes = self.sequences, (dtype_code(dtype), dtype.itemsize)
        yield LEGACY_HEADER.pack(LEGACY_MAGIC, VERSION, *sizes, items, items, self.documents + 1)
        for start in range(0, items + 1, _BLOCK):
            yield np.arange(start, min(start + _BLOCK, items + 1), dtype="<i8").tobytes()
        for sums in _running_sums(_blocks(self._lengths)):
            yield sums.tobytes()
        for lengths in _blocks(self._lengths):
            yield lengths.astype("<i8").tobytes()
        for first in _running_sums(_blocks(self._counts)):  # sequence of each document
            yield first.tobytes()

    def close(self) -> None:
        self._lengths.close()
        self._counts.close()


def _running_sums(blocks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Yields 0, then the sum up to and including each number."""
    yield np.zeros(1, dtype="<i8")
    end = 0
    for block in blocks:
        sums = np.cumsum(block, dtype=np.int64) + end
        end = int(sums[-1])
        yield sums.astype("<i8", copy=False)


def _blocks(stream: IO[bytes]) -> Iterator[np.ndarray]:
    stream.flush()
    position = 0
    while True:
        part = os.pread(stream.fileno(), 4 * _BLOCK, position)
        if not part:
            return
        assert len(part) % 4 == 0
        position += len(part)
        yield np.frombuffer(part, dtype="<i4")
