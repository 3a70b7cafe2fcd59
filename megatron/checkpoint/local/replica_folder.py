"""Folder of a run's local steps on each machine, and the ranks that keep copies of a rank's share (--replication)."""

import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint import paths, retention, storage
from megatron.checkpoint.local import share
from megatron.errors import ConfigError
from megatron.utils import durable

_PLACE = ".place"


@dataclass(frozen=True)
class Copies:
    """Groups of `factor` ranks at stride `jump`. Each rank of a group stores the shares of the whole group."""

    jump: int = 1
    factor: int = 1
    """Number of ranks that store each share; 1 means no copies."""

    @staticmethod
    def of(jump: int, factor: int, world: int) -> "Copies":
        if world % (jump * factor):
            raise ConfigError(
                f"--replication: {world}, the number of ranks, is not a multiple of --replication-jump {jump} "
                f"(default: ranks per machine) x --replication-factor {factor}; give other values, or remove "
                "--replication"
            )
        return Copies(jump, factor)

    def group(self, rank: int) -> tuple[int, ...]:
        first = rank // (self.jump * self.factor) * self.jump * self.factor + rank % self.jump
        return tuple(first + number * self.jump for number in range(self.factor))

    def exchanges(self, rank: int) -> list[tuple[int, int]]:
        """Lists the exchanges of a rank in their order: (rank that gets its share, rank that sends one)."""
        group = self.group(rank)
        place, size = group.index(rank), len(group)
        return [(group[(place + step) % size], group[(place - step) % size]) for step in range(1, size)]

    def check_apart(self, places: Sequence[str], directory: object) -> None:
        """Raises if a copy would be in the same directory as its original, because both would be lost together."""
        for rank in range(len(places)):
            for other in self.group(rank):
                if rank < other and places[rank] == places[other]:
                    raise ConfigError(
                        f"--replication-jump {self.jump}: ranks {rank} and {other} store each other's share, "
                        f"but see the same --non-persistent-local-ckpt-dir {directory}; give the number of ranks per "
                        "machine, or remove --replication"
                    )


def place_of(directory: Path) -> str:
    """Returns an id of this directory: equal on all ranks that see it, different on all others."""
    with storage.storage_errors("preparing --non-persistent-local-ckpt-dir", directory):
        directory.mkdir(parents=True, exist_ok=True)
        if not (directory / _PLACE).exists():
            durable.write_once(directory / _PLACE, [secrets.token_hex(16).encode()])
        return (directory / _PLACE).read_text(encoding="ascii", errors="replace")[:64]


@dataclass(frozen=True)
class ReplicaFolder:
    """Folder of a run's local checkpoints on the machine of rank `rank`."""

    root: Path
    rank: int
    places: tuple[str, ...]
    """The `place_of` of each rank."""
    copies: Copies

    @property
    def mates(self) -> tuple[int, ...]:
        """The ranks that see the same directory."""
        return tuple(rank for rank, place in enumerate(self.places) if place == self.places[self.rank])

    @property
    def duties(self) -> tuple[int, ...]:
        """Ranks whose shares this rank writes: itself, and those of which it keeps copies."""
        return self.copies.group(self.rank)

    @property
    def kept_here(self) -> tuple[int, ...]:
        return tuple(sorted({rank for mate in self.mates for rank in self.copies.group(mate)}))

    def keep_only(self, step: int | None) -> list[str]:
        """Removes all other steps. Each rank removes what it wrote; the first rank of a directory also removes shares
        of ranks that only an earlier layout had. A leftover step only costs disk space, so a failure is a warning."""
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
        """Lists (step, directory) of every share in this directory, the newest first."""
        found = [
            (step, paths.step_directory(directory, step))
            for _, directory in share.rank_directories(self.root)
            for step in paths.list_steps(directory)
        ]
        return sorted(found, key=lambda each: -each[0])
