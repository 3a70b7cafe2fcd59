"""Prints once what all ranks would print."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TextIO


@dataclass(frozen=True)
class RankLog:
    """The log of a rank, passed down explicitly; most lines are printed by rank 0 alone."""

    rank: int = 0
    stream: TextIO = field(default_factory=lambda: sys.stdout)

    @property
    def main(self) -> bool:
        return self.rank == 0

    def info(self, text: str) -> None:
        """Prints on rank 0 only."""
        if self.main:
            print(text, file=self.stream, flush=True)

    def warn(self, text: str) -> None:
        if self.main:
            print(f"warning: {text}", file=self.stream, flush=True)
