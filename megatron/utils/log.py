"""Printing on many ranks: what is the same everywhere is said once."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TextIO


@dataclass(frozen=True)
class RankLog:
    """A value that is handed down; rank 0 speaks for all, every rank may speak for itself."""

    rank: int = 0
    stream: TextIO = field(default_factory=lambda: sys.stdout)

    @property
    def main(self) -> bool:
        return self.rank == 0

    def info(self, text: str) -> None:
        """Said by rank 0 alone."""
        if self.main:
            print(text, file=self.stream, flush=True)

    def warn(self, text: str) -> None:
        if self.main:
            print(f"warning: {text}", file=self.stream, flush=True)
