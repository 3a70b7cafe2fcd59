"""Prints once what all ranks would print."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from datetime import datetime
from typing import TextIO


@dataclass(frozen=True)
class RankLog:
    """The log of a rank, passed down explicitly; most lines are printed by rank 0 alone."""

    rank: int = 0
    stream: TextIO = field(default_factory=lambda: sys.stdout)
    stamped: bool = False
    """Whether every line begins with the time of day."""

    @property
    def main(self) -> bool:
        return self.rank == 0

    def info(self, text: str) -> None:
        """Prints on rank 0 only."""
        if self.main:
            stamp = f"{datetime.now():%H:%M:%S} " if self.stamped else ""
            print(stamp + text.replace("\n", "\n" + stamp), file=self.stream, flush=True)

    def warn(self, text: str) -> None:
        self.info(f"warning: {text}")
