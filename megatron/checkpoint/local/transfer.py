"""Sends files from one rank's disk to another's, and collects a local step on the machines that need it."""

import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint import paths, storage
from megatron.checkpoint.all_ranks import run_on_all
from megatron.checkpoint.local import share
from megatron.checkpoint.local.replica_folder import ReplicaFolder
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.storage import HASH, FileHasher, FileRecord, storage_message
from megatron.distributed.messages import all_gather_json
from megatron.distributed.parallel_state import Axis
from megatron.distributed.streams import block_sizes, stream
from megatron.errors import CheckpointError, StorageError


@dataclass(frozen=True)
class Transfer:
    """The transfer of one file from one rank's disk to another's."""

    file: str
    source: int
    to: int


def _finish(arrived: "list[ReceivedFiles]") -> None:
    for each in arrived:
        each.finish()


@dataclass(frozen=True)
class LocalStep:
    """A complete step: every share of it is on some machine."""

    store: ReplicaFolder
    world: Axis
    manifest: Manifest
    holders: Mapping[int, tuple[str, ...]]
    """Places (`place_of`) with an undamaged copy of each rank's share."""
    share_of: Mapping[str, int]
    """Rank that wrote each file."""

    @contextmanager
    def at_hand(self, needed: Collection[str]) -> Iterator[Path]:
        """Yields a directory with the files that any rank of this machine needs. All ranks call it."""
        leader, name = self.store.mates[0], paths.step_name(self.manifest.step)
        folder = self.store.root / f"{paths.TEMPORARY}{name}.loaded"
        wanted = all_gather_json(sorted(needed), self.world, list[str])
        here = sorted({file for rank in self.store.mates for file in wanted[rank]})
        first = leader == self.store.rank
        try:
            run_on_all(lambda: self._link(folder, here) if first else None, self.world)
            arrived = self._move(folder, self.transfers(wanted))
            run_on_all(lambda: _finish(arrived), self.world)
            yield folder
        finally:
            if first:
                shutil.rmtree(folder, ignore_errors=True)  # mapped files stay readable

    def _link(self, folder: Path, files: list[str]) -> None:
        with storage.storage_errors("collecting the files of a step", folder):
            for left_by_a_kill in self.store.root.glob(f"{paths.TEMPORARY}*.loaded"):
                shutil.rmtree(left_by_a_kill)
            folder.mkdir(parents=True)
            for file in files:
                if self._is_at(file, self.store.places[self.store.rank]):
                    (folder / file).parent.mkdir(parents=True, exist_ok=True)
                    os.link(self._path_of(file), folder / file)

    def _is_at(self, file: str, place: str) -> bool:
        return place in self.holders[self.share_of[file]]

    def _path_of(self, file: str) -> Path:
        return paths.member(self._share(file), file)

    def _share(self, file: str) -> Path:
        return paths.step_directory(share.rank_directory(self.store.root, self.share_of[file]), self.manifest.step)

    def transfers(self, wanted: list[list[str]]) -> list[Transfer]:
        """Lists the transfers, the same on all ranks. Each rank makes its own transfers in this order."""
        ranks_at: dict[str, list[int]] = {}
        for rank, place in enumerate(self.store.places):
            ranks_at.setdefault(place, []).append(rank)
        found = []
        for place, ranks in ranks_at.items():
            for file in sorted({file for rank in ranks for file in wanted[rank]}):
                if not self._is_at(file, place):
                    number = self.share_of[file]
                    senders = ranks_at[self.holders[number][0]]
                    found.append(Transfer(file, senders[number % len(senders)], ranks[0]))
        return found

    def _move(self, folder: Path, transfers: list[Transfer]) -> "list[ReceivedFiles]":
        arrived = []
        for each in transfers:
            files = {each.file: self.manifest.files[each.file]}
            if self.world.rank == each.source:
                stream(self.world, send=blocks_of(self._share(each.file), files), to=each.to)
            elif self.world.rank == each.to:
                arrived.append(ReceivedFiles(folder, files, self.manifest.hash))
                stream(self.world, sizes=arrived[-1].sizes, source=each.source, take=arrived[-1].take)
        return arrived


Files = Mapping[str, FileRecord]


def blocks_of(folder: Path, files: Files) -> Iterator[Tensor]:
    """Yields files as blocks. Unreadable bytes are sent as zeros, which the receiver detects by checksum."""
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


class ReceivedFiles:
    """Files that arrive block by block and are hashed while they are written. Errors of writing are raised by `finish`,
    so that the sender never waits forever."""

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
            raise StorageError(storage_message("writing a file that another rank sent", self._folder, self._error))
        for name, expected in self._files.items():
            if expected.size and self._hashers[name].record() != expected:
                raise StorageError(f"{self._folder / name} arrived with other bytes than were written; try again")
            if not expected.size:
                (self._folder / name).touch()


def swap(axis: Axis, message: bytes, to: int, source: int) -> bytes:
    """Sends one message and receives another."""
    received: list[Tensor] = []
    length = torch.tensor([len(message)]).view(torch.uint8)
    stream(axis, send=[length], to=to, sizes=[8], source=source, take=received.append)
    size = int(received.pop().view(torch.int64).item())
    content = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    stream(axis, send=[content], to=to, sizes=[size], source=source, take=received.append)
    return received.pop().numpy().tobytes()
