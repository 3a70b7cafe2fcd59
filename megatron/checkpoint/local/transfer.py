"""Files of one rank's disk to another rank's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint import paths
from megatron.checkpoint.storage import HASH, FileHasher, FileRecord, storage_message
from megatron.distributed.state import Axis
from megatron.distributed.streams import block_sizes, stream
from megatron.errors import CheckpointError, StorageError

Files = Mapping[str, FileRecord]


def blocks_of(folder: Path, files: Files) -> Iterator[Tensor]:
    """What cannot be read is sent as zeros, which the receiver notices: it waits for a number of bytes."""
    for name, record in files.items():
        with ExitStack() as closing:
            try:
                file = closing.enter_context(open(paths.member(folder, name), "rb"))
            except (OSError, CheckpointError):
                file = None
            for size in block_sizes(record.size):
                block = torch.zeros(size, dtype=torch.uint8)
                try:
                    if file is not None:
                        file.readinto(block.numpy().data)
                except OSError:
                    file = None
                yield block


class Arrivals:
    """Files that arrive block by block, and are hashed as they are written. An error waits for `finish`: the sender is
    not to wait for ever."""

    def __init__(self, folder: Path, files: Files, algorithm: str = HASH) -> None:
        self._folder, self._algorithm = folder, algorithm
        self._places = [(name, record, size) for name, record in files.items() for size in block_sizes(record.size)]
        self.sizes = [size for _, _, size in self._places]
        self._next = iter(self._places)
        self._hashers: dict[str, FileHasher] = {}
        self._files = files
        self._error: OSError | None = None

    def take(self, block: Tensor) -> None:
        name, _, _ = next(self._next)
        data = block.numpy().data
        self._hashers.setdefault(name, FileHasher(self._algorithm)).update(data)
        if self._error is not None:
            return
        path = self._folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "ab") as file:
                file.write(data)
        except OSError as error:
            self._error = error

    def finish(self) -> None:
        if self._error is not None:
            raise StorageError(storage_message("writing what another rank sent", self._folder, self._error))
        for name, expected in self._files.items():
            if expected.size and self._hashers[name].record() != expected:
                raise StorageError(f"{self._folder / name} arrived with other bytes than were written; try again")
            if not expected.size:
                (self._folder / name).touch()


def send_files(axis: Axis, folder: Path, files: Files, to: int) -> None:
    stream(axis, send=blocks_of(folder, files), to=to)


def receive_files(axis: Axis, arrivals: Arrivals, source: int) -> None:
    stream(axis, sizes=arrivals.sizes, source=source, take=arrivals.take)


def swap(axis: Axis, message: bytes, to: int, source: int) -> bytes:
    """Sends one message and receives another."""
    received: list[Tensor] = []
    length = torch.tensor([len(message)]).view(torch.uint8)
    stream(axis, send=[length], to=to, sizes=[8], source=source, take=received.append)
    size = int(received.pop().view(torch.int64).item())
    content = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    stream(axis, send=[content], to=to, sizes=[size], source=source, take=received.append)
    return received.pop().numpy().tobytes()
