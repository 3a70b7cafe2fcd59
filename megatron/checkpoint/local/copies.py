"""Which other ranks have a copy of a rank's share (--replication)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.errors import ConfigError


@dataclass(frozen=True)
class Copies:
    """Ranks N, N + jump, ... of the same `jump * factor` ranks have each other's shares."""

    jump: int = 1
    factor: int = 1
    """1: there are no copies."""

    @staticmethod
    def of(jump: int, factor: int, world: int) -> Copies:
        if world % (jump * factor):
            raise ConfigError(
                f"--replication: {world}, the number of ranks, is no multiple of --replication-jump {jump} (unset, the "
                f"ranks of a machine) x --replication-factor {factor}; give others, or leave --replication out"
            )
        return Copies(jump, factor)

    def group(self, rank: int) -> tuple[int, ...]:
        first = rank // (self.jump * self.factor) * self.jump * self.factor + rank % self.jump
        return tuple(first + number * self.jump for number in range(self.factor))

    def exchanges(self, rank: int) -> list[tuple[int, int]]:
        """(to whom it sends its share, from whom it receives one), one after the other."""
        group = self.group(rank)
        place, size = group.index(rank), len(group)
        return [(group[(place + step) % size], group[(place - step) % size]) for step in range(1, size)]

    def check_apart(self, places: Sequence[str], directory: object) -> None:
        """Refuses a copy in the same directory as its original: both would be lost together."""
        for rank in range(len(places)):
            for other in self.group(rank):
                if rank < other and places[rank] == places[other]:
                    raise ConfigError(
                        f"--replication-jump {self.jump}: ranks {rank} and {other} are to have copies of each other's "
                        f"share, and see the same --non-persistent-local-ckpt-dir {directory}; give the number of "
                        "ranks of a machine, or leave --replication out"
                    )
