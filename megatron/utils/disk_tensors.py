"""Tensors that are stored in a file, and are in memory one at a time.

    tensors = DiskTensors(Path("/scratch"), [len_0, len_1, ...])
    for index, tensor in tensors.sweep():     # threads read the next one and write the previous one
        tensor.mul_(2)
    tensors.close()

The file has no name, so it disappears however the process ends.
"""

import errno
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from megatron.errors import StorageError

_IN_MEMORY = 3
"""Number of tensors in memory: one being read, one in use, one being written."""


class DiskTensors:
    def __init__(self, directory: Path, lengths: Sequence[int], *, setting: str, dtype: torch.dtype = torch.float32):
        """Makes one tensor of zeros for each of the `lengths`. Messages name the directory by `setting`."""
        self._lengths, self._what = tuple(lengths), f"{setting} {directory}"
        ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).mul(dtype.itemsize).tolist()
        self._starts, self.size = ends[:-1], ends[-1]
        file = self._reserved(directory)
        self._file = file.fileno()
        self._closed = weakref.finalize(self, file.close)  # frees the disk space with the object
        longest = max(lengths, default=0)
        self._buffers = [torch.empty(longest, dtype=dtype) for _ in range(min(_IN_MEMORY, len(lengths)))]
        self._reader, self._writer = (ThreadPoolExecutor(1, f"optimizer-{name}") for name in ("read", "write"))
        self._writes: dict[int, Future[None]] = {}

    def sweep(self, *, changes: bool = True) -> Iterator[tuple[int, Tensor]]:
        """Yields every tensor in turn. The caller's changes are written back unless `changes` is False."""
        self._finish_writes()  # left over if the previous sweep was not finished
        coming = self._start_read(0) if self._lengths else None
        for index in range(len(self._lengths)):
            assert coming is not None
            coming.result()
            coming = self._start_read(index + 1) if index + 1 < len(self._lengths) else None
            yield index, self._place(index)
            if changes:
                self._writes[index] = self._writer.submit(self._write, index)
        self._finish_writes()

    def _finish_writes(self) -> None:
        while self._writes:
            self._writes.popitem()[1].result()

    def close(self) -> None:
        self._reader.shutdown()
        self._writer.shutdown()
        self._closed()

    def _place(self, index: int) -> Tensor:
        return self._buffers[index % len(self._buffers)][: self._lengths[index]]

    def _start_read(self, index: int) -> Future[None]:
        before = self._writes.pop(index - len(self._buffers), None)  # it is written from the same memory
        return self._reader.submit(self._read, index, before)

    def _read(self, index: int, after: Future[None] | None) -> None:
        if after is not None:
            after.result()
        data, done = _bytes(self._place(index)), 0
        with self._errors("read"):
            while done < len(data):
                count = os.preadv(self._file, [data[done:]], self._starts[index] + done)
                if count == 0:
                    raise OSError(errno.EIO, "the file ends early")
                done += count

    def _write(self, index: int) -> None:
        data, done = _bytes(self._place(index)), 0
        with self._errors("written"):
            while done < len(data):
                done += os.pwritev(self._file, [data[done:]], self._starts[index] + done)

    @contextmanager
    def _errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"{self._what}: the optimizer's state could not be {verb} ({error.strerror}); resume from the last "
                "checkpoint, with another directory"
            ) from None

    def _reserved(self, directory: Path) -> IO[bytes]:
        """Creates the file with all its disk space allocated, so that a full disk is found before training."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
        except OSError as error:
            raise StorageError(f"{self._what}: cannot be written ({error.strerror}); name another directory") from None
        try:
            if self.size:
                os.posix_fallocate(file.fileno(), 0, self.size)
        except OSError as error:
            file.close()
            free = 0
            with suppress(OSError):
                free = shutil.disk_usage(directory).free
            raise StorageError(
                f"{self._what}: the optimizer's state needs {self.size / 1e9:.3f} GB there and {free / 1e9:.3f} GB are "
                f"free ({error.strerror}); name another directory, or offload less of it"
            ) from None
        return file


def _bytes(tensor: Tensor) -> memoryview:
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)
