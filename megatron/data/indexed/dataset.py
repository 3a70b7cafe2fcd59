"""Reads .bin/.idx datasets. Opening one checks the whole index; reading a sequence is a slice."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.blend import prefix_meant
from megatron.data.indexed.files import array_bytes, map_tokens, regular_file_size
from megatron.data.indexed.index_file import LEGACY_MAGIC, Index, read_index
from megatron.data.indexed.legacy import read_legacy_index
from megatron.errors import ConfigError, DataError

SAMPLED_BYTES = 4096
"""Bytes per block of `IndexedDataset.sampled`."""


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


def without_ending(name: str) -> str:
    """Returns the prefix of a dataset that is named by one of its files."""
    return name.removesuffix(".bin").removesuffix(".idx")


class IndexedDataset:
    """Sequences of tokens by index. `mmap=False` reads with pread, for file systems where mapping is slow. With `pool`
    (a cached `map_tokens`) the .bin is mapped on use, and the number of maps is bounded."""

    def __init__(
        self, prefix: str | Path, *, mmap: bool = True, pool: Callable[[Path, np.dtype, int], np.ndarray] | None = None
    ) -> None:
        self.prefix = str(prefix)
        self.mmap = mmap
        self._pool = pool
        idx, data = self._existing_paths()
        setting = f"data prefix {self.prefix}"
        idx_bytes, self._bin_bytes = regular_file_size(idx, setting), regular_file_size(data, setting)
        with open(idx, "rb") as stream:
            self.legacy = stream.read(len(LEGACY_MAGIC)) == LEGACY_MAGIC  # the lazy and cached kinds
        reader = read_legacy_index if self.legacy else read_index
        self._attach(reader(idx, idx_bytes, self._bin_bytes), data)

    def _existing_paths(self) -> tuple[Path, Path]:
        idx, data = idx_path(self.prefix), bin_path(self.prefix)
        for path in (idx, data):
            if not os.path.lexists(path):
                raise ConfigError(f"data prefix {self.prefix}: {path} does not exist; {prefix_meant(self.prefix)}")
        return idx, data

    def _attach(self, index: Index, data: Path) -> None:
        self.dtype = index.dtype
        self.sequence_lengths = index.lengths
        self.document_indices = index.documents
        self._offsets = index.offsets
        self._bin = data
        self._file: int | None = None
        self._tokens: np.ndarray | None = None
        if not self.mmap:
            self._file = os.open(data, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        elif not self._bin_bytes:  # an empty file cannot be mapped
            self._tokens = np.empty(0, dtype=self.dtype)
        elif self._pool is None:
            self._tokens = map_tokens(data, self.dtype, self._bin_bytes)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, sequence: int) -> np.ndarray:
        return self.get(sequence)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Returns tokens [offset, offset + length) of one sequence, or all from `offset` if `length` is None."""
        if not 0 <= sequence < len(self):
            raise IndexError(f"sequence {sequence} does not exist; the dataset has {len(self)}, numbered from 0")
        available = int(self.sequence_lengths[sequence]) - offset
        count = available if length is None else length
        if offset < 0 or not 0 <= count <= available:
            raise IndexError(
                f"sequence {sequence} has {available + offset} tokens; tokens {offset} to {offset + count} are outside "
                "of it"
            )
        start = int(self._offsets[sequence]) // self.dtype.itemsize + offset
        if self._tokens is not None:
            return self._tokens[start : start + count]
        if self._file is None and self._pool is not None:
            return self._pool(self._bin, self.dtype, self._bin_bytes)[start : start + count]
        return self._read(start, count)

    def _read(self, start: int, count: int) -> np.ndarray:
        assert self._file is not None
        wanted, position, parts = count * self.dtype.itemsize, start * self.dtype.itemsize, []
        while wanted:
            part = os.pread(self._file, wanted, position)
            if not part:
                raise DataError(
                    f"{self._bin}: ends at byte {position}, because it was truncated while in use; restore it and "
                    "resume"
                )
            parts.append(part)
            wanted -= len(part)
            position += len(part)
        return np.frombuffer(b"".join(parts), dtype=self.dtype)

    @property
    def num_documents(self) -> int:
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        return self._bin_bytes // self.dtype.itemsize

    @property
    def fingerprint(self) -> str:
        """Hash of the index and of the .bin's size. Opening checks the index, so the hash covers every byte of it."""
        digest = hashlib.sha256()
        digest.update(f"{self.dtype.str} {len(self)} {self.num_documents} {self._bin_bytes}\n".encode())
        for array in (self.sequence_lengths, self.document_indices):
            digest.update(array_bytes(array))
        return digest.hexdigest()

    def sampled(self, blocks: int) -> str:
        """Digest of `blocks` evenly spaced blocks of the .bin. A few small reads tell apart files of any size that have
        equal indices."""
        digest = hashlib.sha256()
        last = max(0, self._bin_bytes - SAMPLED_BYTES)
        with open(self._bin, "rb") as stream:
            for number in range(blocks):
                digest.update(os.pread(stream.fileno(), SAMPLED_BYTES, last * number // max(1, blocks - 1)))
        return digest.hexdigest()

    def document_of(self, sequence: int) -> int:
        return int(np.searchsorted(self.document_indices, sequence, side="right")) - 1

    def document_bounds(self, first: int, stop: int) -> np.ndarray:
        """Byte offsets in the .bin where documents [first, stop) begin and the last ends: int64 [stop - first + 1]."""
        sequences = self.document_indices[first : stop + 1]
        if not len(self):
            return np.zeros(len(sequences), dtype=np.int64)
        bounds = self._offsets[np.minimum(sequences, len(self) - 1)]
        bounds[sequences == len(self)] = self._bin_bytes
        return bounds

    def documents_ending_in(self, start: int, stop: int) -> tuple[int, int]:
        """Returns the range [first, last) of documents whose last byte is in [start, stop), with empty ones between."""
        first = int(np.searchsorted(self._offsets, start, side="right"))
        last = int(np.searchsorted(self._offsets, stop, side="right")) + (stop >= self._bin_bytes)
        ends = self.document_indices[1:]
        return int(np.searchsorted(ends, first)), int(np.searchsorted(ends, last))

    def document_at(self, byte: int) -> int:
        """Returns the document that holds this byte of the .bin."""
        return self.document_of(int(np.searchsorted(self._offsets, byte, side="right")) - 1)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.close()

    # A worker process reopens the files: only names are pickled.
    def __getstate__(self) -> dict[str, Any]:
        return {"prefix": self.prefix, "mmap": self.mmap}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["prefix"], mmap=state["mmap"])  # type: ignore[misc]
