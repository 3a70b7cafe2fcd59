"""Writes .bin/.idx datasets. Files get their final names only when all of them are complete and synced."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import BinaryIO

import numpy as np

from megatron.data.indexed.checksums import BLOCK_BYTES, FileChecksums
from megatron.data.indexed.dataset import IndexedDataset, bin_path, idx_path
from megatron.data.indexed.files import array_bytes, open_alone
from megatron.data.indexed.growing import GrowingIndex
from megatron.data.indexed.index_file import dtype_code
from megatron.data.indexed.record import record_path
from megatron.errors import ConfigError, DataError, MegatronError
from megatron.utils.durable import BlockHasher, fsync_directory, storage_error, try_lock, writing

_COPY_BYTES = 16 << 20
_BLOCK = 1 << 20
_INT32_MAX = np.iinfo(np.int32).max


@dataclass(frozen=True)
class DatasetSummary:
    """Facts about the dataset that was written."""

    prefix: str
    dtype: str
    documents: int
    sequences: int
    tokens: int
    max_id: int  # -1 without tokens
    checksums: FileChecksums  # of the .bin


def give_names(prefix: str, tokens: Path, index: Path) -> None:
    """Renames the files of a dataset to their final names. The index is last, because it makes the dataset valid. An
    old record or index is removed first, so that it never describes the new tokens."""
    with writing(bin_path(prefix)):
        for old in (record_path(prefix), idx_path(prefix)):
            old.unlink(missing_ok=True)
        fsync_directory(bin_path(prefix).parent)
        tokens.replace(bin_path(prefix))
        index.replace(idx_path(prefix))
        fsync_directory(bin_path(prefix).parent)


class IndexedDatasetBuilder:
    """Writes documents to PREFIX.bin.partial; `finalize` renames it to .bin and writes .idx last.

    Memory is constant: the index grows in unnamed files. The context manager finalizes on success and removes the
    files on an exception.
    """

    def __init__(
        self, prefix: str | Path, dtype: np.dtype | type | str, *, overwrite: bool = False, impl: str = "mmap"
    ) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        dtype_code(self.dtype)  # rejects a dtype that the format lacks
        self._overwrite, self._impl = overwrite, impl
        self._checksums = BlockHasher(BLOCK_BYTES)
        self._tokens, self._max_id = 0, -1
        self._partial = Path(f"{self.prefix}.bin.partial")
        self._partial_idx = Path(f"{self.prefix}.idx.partial")
        self._clear_interrupted()
        self._refuse_existing()
        self._stream: BinaryIO | None = open_alone(self._partial)
        try:
            folder = self._partial.parent
            self._index = GrowingIndex(TemporaryFile(dir=folder), TemporaryFile(dir=folder))  # noqa: SIM115
        except OSError as error:
            self._partial.unlink(missing_ok=True)
            raise storage_error(self._partial, error) from error

    def _clear_interrupted(self) -> None:
        """Removes a .bin without .idx, which remains if a run is killed between its two renames."""
        final_bin = Path(f"{self.prefix}.bin")
        if not self._partial_idx.exists() or os.path.lexists(f"{self.prefix}.idx") or not final_bin.is_file():
            return
        with contextlib.suppress(OSError), open(final_bin, "rb") as stream:  # raised if the writer lives or locks fail
            if try_lock(stream.fileno()):
                final_bin.unlink()

    def _refuse_existing(self) -> None:
        for suffix in (".bin", ".idx"):
            if not self._overwrite and os.path.lexists(f"{self.prefix}{suffix}"):
                raise ConfigError(
                    f"output {self.prefix}{suffix} exists; choose another --output-prefix, or give --overwrite"
                )

    def add_document(self, tokens: Sequence[int] | np.ndarray, lengths: Sequence[int] | None = None) -> None:
        """Adds one document. `lengths` splits it into sequences (default: one; [] for a document without any)."""
        ids = self._checked_tokens(tokens)
        sizes = self._checked_lengths([ids.size] if lengths is None else lengths, ids.size)
        self._write(ids, sizes, np.array([len(sizes)], dtype=np.int32))

    def add_dataset(self, prefix: str | Path, *, on_block: Callable[[memoryview], None] | None = None) -> None:
        """Appends a dataset of the same token dtype, streaming. `on_block` receives the bytes of its .bin."""
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise DataError(
                f"{prefix}: token dtype {other.dtype}, but {self.prefix} is {self.dtype}; preprocess one of them again"
            )
        # Hashing releases the GIL: each hash has a thread, while this one checks and writes.
        with open(bin_path(prefix), "rb") as stream, ThreadPoolExecutor(2) as hashing:
            for block in iter(lambda: stream.read(_COPY_BYTES), b""):
                view = memoryview(block)
                jobs = [hashing.submit(self._checksums.update, view)]
                if on_block is not None:
                    jobs.append(hashing.submit(on_block, view))
                self._write_tokens(self._checked_tokens(np.frombuffer(block, dtype=self.dtype)))
                for job in jobs:
                    job.result()
        for start in range(0, other.num_documents, _BLOCK):
            bounds = other.document_indices[start : start + _BLOCK + 1]
            lengths = other.sequence_lengths[int(bounds[0]) : int(bounds[-1])]
            self._write(np.empty(0, dtype=self.dtype), lengths, np.diff(bounds).astype(np.int32))

    def _checked_tokens(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Rejects ids that do not fit the dtype, which would wrap around."""
        ids = np.asarray(tokens)
        if not ids.size:
            return np.empty(0, dtype=self.dtype)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise DataError(f"{self.prefix}: tokens must be a list of integers, not {ids.dtype} of shape {ids.shape}")
        low, high, limit = int(ids.min()), int(ids.max()), np.iinfo(self.dtype)
        if low < 0 or high > limit.max:
            wrong = low if low < 0 else high
            raise DataError(
                f"{self.prefix}: token id {wrong} does not fit {self.dtype} (0..{limit.max}); give such ids or a "
                "larger dtype"
            )
        self._max_id = max(self._max_id, high)
        return np.ascontiguousarray(ids, dtype=self.dtype)

    def _checked_lengths(self, lengths: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
        sizes = np.asarray(lengths, dtype=np.int64)
        if len(sizes) and (sizes.min() < 0 or sizes.max() > _INT32_MAX):
            wrong = int(sizes.min()) if sizes.min() < 0 else int(sizes.max())
            raise DataError(
                f"{self.prefix}: a sequence has {wrong} tokens, but the format allows 0..{_INT32_MAX}; split it"
            )
        if int(sizes.sum()) != count:
            raise DataError(f"{self.prefix}: lengths add up to {int(sizes.sum())}, but there are {count} tokens")
        return sizes.astype(np.int32)

    def _write(self, ids: np.ndarray, lengths: np.ndarray, counts: np.ndarray) -> None:
        self._write_tokens(ids)
        self._checksums.update(array_bytes(ids))
        with self._aborted_on_failure(self._partial):
            self._index.add(lengths, counts)

    def _write_tokens(self, ids: np.ndarray) -> None:
        """Writes tokens without adding them to the checksums."""
        assert self._stream is not None, "the dataset is finished"
        with self._aborted_on_failure(self._partial):
            self._stream.write(array_bytes(ids))
        self._tokens += ids.size

    @contextlib.contextmanager
    def _aborted_on_failure(self, path: Path) -> Iterator[None]:
        try:
            with writing(path):
                yield
        except MegatronError:
            self.abort()
            raise

    def finalize(self) -> DatasetSummary:
        """Syncs both files, then gives them their final names, .idx last."""
        assert self._stream is not None, "the dataset is finished"
        with self._aborted_on_failure(bin_path(self.prefix)):
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._index.write(self._partial_idx, self.dtype, self._impl)
            self._refuse_existing()
            give_names(self.prefix, self._partial, self._partial_idx)
        self._stream.close()
        self._stream = None
        self._index.close()
        return DatasetSummary(
            prefix=self.prefix,
            dtype=self.dtype.name,
            documents=self._index.documents,
            sequences=self._index.sequences,
            tokens=self._tokens,
            max_id=self._max_id,
            checksums=FileChecksums.of(self._checksums),
        )

    def abort(self) -> None:
        """Removes what was written so far."""
        if self._stream is not None:
            self._partial.unlink(missing_ok=True)
            self._partial_idx.unlink(missing_ok=True)
            stream, self._stream = self._stream, None
            with contextlib.suppress(OSError):  # a full disk fails again when the buffer is flushed
                stream.close()
            with contextlib.suppress(OSError):
                self._index.close()

    def __enter__(self) -> "IndexedDatasetBuilder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        elif self._stream is not None:
            self.finalize()
