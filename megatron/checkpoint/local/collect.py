"""The files of a local step, brought to the machines that need them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint import paths, storage
from megatron.checkpoint.all_ranks import run_on_all
from megatron.checkpoint.local import share
from megatron.checkpoint.local.store import ReplicaFolder
from megatron.checkpoint.local.transfer import Arrivals, receive_files, send_files
from megatron.checkpoint.manifest import Manifest
from megatron.distributed.messages import all_gather_json
from megatron.distributed.state import Axis


@dataclass(frozen=True)
class Transfer:
    """The transfer of one file from one rank's disk to another's."""

    file: str
    source: int
    to: int


def _finish(arrived: list[Arrivals]) -> None:
    for each in arrived:
        each.finish()


@dataclass(frozen=True)
class LocalStep:
    """A complete step: every share of it is on some machine."""

    store: ReplicaFolder
    world: Axis
    manifest: Manifest
    holders: Mapping[int, tuple[str, ...]]
    """By share: the places that have an undamaged copy of it."""
    share_of: Mapping[str, int]
    """By file: the rank that wrote it."""

    @contextmanager
    def at_hand(self, needed: Collection[str]) -> Iterator[Path]:
        """A directory with the files that any rank of this machine needs. All ranks call it."""
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
                shutil.rmtree(folder, ignore_errors=True)  # what is mapped stays until it is not needed

    def _link(self, folder: Path, files: list[str]) -> None:
        with storage.storage_errors("bringing the files of a step together", folder):
            if folder.exists():
                shutil.rmtree(folder)
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
        """The same on all ranks, which take part in their own, in this order."""
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

    def _move(self, folder: Path, transfers: list[Transfer]) -> list[Arrivals]:
        arrived = []
        for each in transfers:
            files = {each.file: self.manifest.files[each.file]}
            if self.world.rank == each.source:
                send_files(self.world, self._share(each.file), files, each.to)
            elif self.world.rank == each.to:
                arrived.append(Arrivals(folder, files, self.manifest.hash))
                receive_files(self.world, arrived[-1], each.source)
        return arrived
