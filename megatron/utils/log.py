"""Prints whole lines of ranks; lines common to all ranks are printed once."""

import io
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TextIO

from megatron.commands import as_typed_here
from megatron.errors import printable


def escape_unprintable(stream: TextIO) -> None:
    """Makes the stream escape what its encoding lacks, such as the bytes of a path that is not UTF-8, so that printing
    a line never ends a run."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
        stream.reconfigure(errors="backslashreplace")


def print_lines(lines: Iterable[str], stream: TextIO | None = None) -> None:
    """Prints lines in one write, to stdout by default; each is made `printable` at any length. Ranks run with
    unbuffered output under torchrun (`python -u`). There `print` writes a text and its line end separately, and another
    rank's line can come between."""
    stream = stream or sys.stdout
    stream.write("".join(f"{printable(line, sys.maxsize)}\n" for line in lines))
    stream.flush()


def print_line(text: str, stream: TextIO | None = None) -> None:
    print_lines([text], stream)


@dataclass(frozen=True)
class RankLog:
    """Log of a rank, passed down explicitly; most lines are printed by rank 0 only."""

    rank: int = 0
    stream: TextIO = field(default_factory=lambda: sys.stdout)
    stamped: bool = False
    """Every line begins with the time of day."""

    def __post_init__(self) -> None:
        escape_unprintable(self.stream)

    @property
    def main(self) -> bool:
        return self.rank == 0

    def info(self, *lines: str) -> None:
        """Prints on rank 0 only."""
        if self.main:
            stamp = f"{datetime.now():%H:%M:%S} " if self.stamped else ""
            print_lines([stamp + line for line in lines], self.stream)

    def warn(self, text: str) -> None:
        """Prints one line on rank 0. Its length is limited, because it may quote a user or a file."""
        self.info(printable(as_typed_here(f"warning: {text}")))
