"""The place of a run's local steps on each machine."""

from __future__ import annotations

import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint import paths, retention, storage
from megatron.checkpoint.local import share
from megatron.checkpoint.local.copies import Copies
from megatron.utils import durable

_PLACE = ".place"


def place_of(directory: Path) -> str:
    """An id of this directory: equal on all ranks that see it, different on all others."""
    with storage.storage_errors("preparing --non-persistent-local-ckpt-dir", directory):
        directory.mkdir(parents=True, exist_ok=True)
        if not (directory / _PLACE).exists():
            durable.write_once(directory / _PLACE, [secrets.token_hex(16).encode()])
        return (directory / _PLACE).read_text(encoding="ascii", errors="replace")[:64]


@dataclass(frozen=True)
class ReplicaFolder:
    """The local steps of a run, as rank `rank` sees them."""

    root: Path
    rank: int
    places: tuple[str, ...]
    """By rank: its `place_of`."""
    copies: Copies

    @property
    def mates(self) -> tuple[int, ...]:
        """The ranks that see the same directory."""
        return tuple(rank for rank, place in enumerate(self.places) if place == self.places[self.rank])

    @property
    def duties(self) -> tuple[int, ...]:
        """The ranks whose shares this one writes."""
        return self.copies.group(self.rank)

    @property
    def kept_here(self) -> tuple[int, ...]:
        return tuple(sorted({rank for mate in self.mates for rank in self.copies.group(mate)}))

    def keep_only(self, step: int | None) -> list[str]:
        """Removes all other steps: each rank those that it has written, and the first rank of a place those of ranks
        that only an earlier layout had. A step too many only costs disk space, so a failure is a warning."""
        try:
            self._remove_all_but(step)
        except OSError as error:
            return [f"warning: {storage.storage_message('deleting old steps', self.root, error)}"]
        return []

    def _remove_all_but(self, step: int | None) -> None:
        others = {} if self.rank != self.mates[0] else dict(share.rank_directories(self.root))
        for rank in self.kept_here:
            others.pop(rank, None)
        for directory in others.values():
            shutil.rmtree(directory)
        for rank in self.duties:
            retention.keep_only(share.rank_directory(self.root, rank), step)

    def shares(self) -> list[tuple[int, Path]]:
        """(step, directory) of every share at this place, the newest first."""
        found = [
            (step, paths.step_directory(directory, step))
            for _, directory in share.rank_directories(self.root)
            for step in paths.list_steps(directory)
        ]
        return sorted(found, key=lambda each: -each[0])
