"""The writer of .bin/.idx datasets. Nothing stands under a final name before all of it is on the disk."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from megatron.data.checksums import BlockChecksums, FileChecksums
from megatron.data.files import as_bytes, fsync_directory, storage_error
from megatron.data.growing import GrowingIndex, unnamed_file
from megatron.data.index_file import dtype_code
from megatron.errors import ConfigError, DataError, MegatronError

_COPY_BYTES = 16 << 20
_BLOCK = 1 << 20
_INT32_MAX = np.iinfo(np.int32).max


@dataclass(frozen=True)
class DatasetSummary:
    """What was written."""

    prefix: str
    dtype: str
    documents: int
    sequences: int
    tokens: int
    max_id: int  # -1 without tokens
    longest_document: int
    empty_documents: int
    checksums: FileChecksums | None = None  # of the .bin


class IndexedDatasetBuilder:
    """Documents go to PREFIX.bin.partial; `finalize` renames it to .bin and writes .idx last.

    Memory is flat: the index grows in files without a name. As a context manager it finalizes on success and
    removes what it wrote on an exception.
    """

    def __init__(
        self, prefix: str | Path, dtype: np.dtype | type | str, *, overwrite: bool = False, impl: str = "mmap"
    ) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        dtype_code(self.dtype)  # refuses what is no kind of token
        self._overwrite, self._impl = overwrite, impl
        self._checksums = BlockChecksums()
        self._tokens, self._max_id, self._longest, self._empty = 0, -1, 0, 0
        self._partial = Path(f"{self.prefix}.bin.partial")
        self._partial_idx = Path(f"{self.prefix}.idx.partial")
        self._clear_interrupted()
        self._refuse_existing()
        self._stream: BinaryIO | None = open_alone(self._partial)
        try:
            self._index = GrowingIndex(unnamed_file(self._partial.parent), unnamed_file(self._partial.parent))
        except OSError as error:
            self._partial.unlink(missing_ok=True)
            raise storage_error(self._partial, error) from error

    def _clear_interrupted(self) -> None:
        """A run that was killed between its two renames left a .bin that nobody can open: it is in nobody's way."""
        final_bin = Path(f"{self.prefix}.bin")
        if not self._partial_idx.exists() or os.path.lexists(f"{self.prefix}.idx") or not final_bin.is_file():
            return
        with open(final_bin, "rb") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # that run is alive, or nobody can tell
                return
            final_bin.unlink()

    def _refuse_existing(self) -> None:
        for suffix in (".bin", ".idx"):
            if not self._overwrite and os.path.lexists(f"{self.prefix}{suffix}"):
                raise ConfigError(
                    f"output {self.prefix}{suffix} exists; choose another --output-prefix or give --overwrite"
                )

    def add_document(self, tokens: Sequence[int] | np.ndarray, lengths: Sequence[int] | None = None) -> None:
        """One document; `lengths` cuts it into sequences (default: one sequence; [] for a document of none)."""
        ids = self._checked_tokens(tokens)
        sizes = self._checked_lengths([ids.size] if lengths is None else lengths, ids.size)
        self._write(ids, sizes, np.array([len(sizes)], dtype=np.int32))
        self._longest = max(self._longest, ids.size)
        self._empty += ids.size == 0

    def add_documents(self, tokens: Sequence[int] | np.ndarray, lengths: Sequence[int] | np.ndarray) -> None:
        """Many documents of one sequence each, laid end to end: the fast way for a block of text."""
        ids = self._checked_tokens(tokens)
        sizes = self._checked_lengths(lengths, ids.size)
        self._write(ids, sizes, np.ones(len(sizes), dtype=np.int32))
        self._longest = max(self._longest, int(sizes.max(initial=0)))
        self._empty += int(np.count_nonzero(sizes == 0))

    def add_dataset(self, prefix: str | Path, *, on_block: Callable[[memoryview], None] | None = None) -> None:
        """Appends a whole dataset of the same token dtype, streaming. `on_block` sees the bytes of its .bin."""
        from megatron.data.indexed import IndexedDataset, bin_path  # the reader, which in turn names this writer

        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise DataError(
                f"{prefix}: token dtype {other.dtype}, but {self.prefix} is {self.dtype}; rewrite one of them"
            )
        # Hashing lets go of the interpreter's lock: a thread for each of the two, and this one looks and writes.
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
            sums = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            per_document = np.diff(sums[bounds - bounds[0]])
            self._longest = max(self._longest, int(per_document.max(initial=0)))
            self._empty += int(np.count_nonzero(per_document == 0))

    def _checked_tokens(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """An id that does not fit is refused, never wrapped around."""
        ids = np.asarray(tokens)
        if not ids.size:
            return np.empty(0, dtype=self.dtype)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise DataError(f"{self.prefix}: tokens must be a list of integers, not {ids.dtype} of shape {ids.shape}")
        low, high, limit = int(ids.min()), int(ids.max()), np.iinfo(self.dtype)
        if low < 0 or high > limit.max:
            wrong = low if low < 0 else high
            raise DataError(f"{self.prefix}: token id {wrong} does not fit {self.dtype} (0..{limit.max}); use int32")
        self._max_id = max(self._max_id, high)
        return np.ascontiguousarray(ids, dtype=self.dtype)

    def _checked_lengths(self, lengths: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
        sizes = np.asarray(lengths, dtype=np.int64)
        if len(sizes) and (sizes.min() < 0 or sizes.max() > _INT32_MAX):
            wrong = int(sizes.min()) if sizes.min() < 0 else int(sizes.max())
            raise DataError(f"{self.prefix}: sequence of {wrong} tokens; the format holds 0..{_INT32_MAX}, cut it up")
        if int(sizes.sum()) != count:
            raise DataError(f"{self.prefix}: lengths add up to {int(sizes.sum())} for {count} tokens")
        return sizes.astype(np.int32)

    def _write(self, ids: np.ndarray, lengths: np.ndarray, counts: np.ndarray) -> None:
        self._write_tokens(ids)
        self._checksums.update(as_bytes(ids))
        try:
            self._index.add(lengths, counts)
        except OSError as error:
            self.abort()
            raise storage_error(self._partial, error) from error

    def _write_tokens(self, ids: np.ndarray) -> None:
        """Without their checksums."""
        assert self._stream is not None, "the dataset is finished"
        try:
            self._stream.write(as_bytes(ids))
        except OSError as error:
            self.abort()
            raise storage_error(self._partial, error) from error
        self._tokens += ids.size

    def finalize(self) -> DatasetSummary:
        """Both files are whole and on the disk before either gets its name; .idx is named last."""
        assert self._stream is not None, "the dataset is finished"
        try:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._index.write(self._partial_idx, self.dtype, self._impl)
            self._refuse_existing()
            if self._overwrite:  # the old record and index must never describe the new tokens
                Path(f"{self.prefix}.meta.json").unlink(missing_ok=True)
                Path(f"{self.prefix}.idx").unlink(missing_ok=True)
                fsync_directory(self._partial.parent)
            self._partial.replace(f"{self.prefix}.bin")
            self._partial_idx.replace(f"{self.prefix}.idx")
            fsync_directory(self._partial.parent)
        except OSError as error:
            self.abort()
            raise storage_error(Path(f"{self.prefix}.bin"), error) from error
        except MegatronError:
            self.abort()
            raise
        self._stream.close()
        self._stream = None
        self._index.close()
        return self._summary()

    def _summary(self) -> DatasetSummary:
        return DatasetSummary(
            prefix=self.prefix,
            dtype=self.dtype.name,
            documents=self._index.documents,
            sequences=self._index.sequences,
            tokens=self._tokens,
            max_id=self._max_id,
            longest_document=self._longest,
            empty_documents=self._empty,
            checksums=self._checksums.checksums(),
        )

    def abort(self) -> None:
        """Removes what was written so far."""
        if self._stream is not None:
            self._partial.unlink(missing_ok=True)
            self._partial_idx.unlink(missing_ok=True)
            stream, self._stream = self._stream, None
            with contextlib.suppress(OSError):  # a full disk says so a second time, when the buffer is dropped
                stream.close()
            with contextlib.suppress(OSError):
                self._index.close()

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        elif self._stream is not None:
            self.finalize()


def open_alone(path: Path) -> BinaryIO:
    """Opens for writing under a lock, so that two runs cannot write one output; a dead run's leftover is reused."""
    if not path.parent.is_dir():
        raise ConfigError(f"output {path.parent}: no such directory; create it or choose another --output-prefix")
    try:
        stream = open(path, "ab")  # not "wb": the file may belong to a run that is alive  # noqa: SIM115
    except OSError as error:
        raise storage_error(path, error) from error
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = os.fstat(stream.fileno())
        if not path.exists() or not os.path.samestat(held, path.stat()):
            raise BlockingIOError  # the other run finished between our open and our lock
    except BlockingIOError:
        stream.close()
        raise ConfigError(
            f"output {path}: another process is writing it; wait for it or choose another prefix"
        ) from None
    except OSError:
        pass  # a file system without locks: the final check for an existing output remains
    stream.truncate(0)
    return stream
