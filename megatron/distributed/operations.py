"""What this rank is doing between ranks, for whoever looks from another thread: the heartbeat.

Every axis of a ParallelState notes here which collective it begins, counted for each axis, and when it waits. All
members of an axis begin the same collectives in the same order, so equal counts are the same collective.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_REMEMBERED = 32


@dataclass(frozen=True)
class Operation:
    """One collective, or a message between two stages (`number` 0)."""

    name: str
    axis: str
    ranks: tuple[int, ...]
    number: int = 0
    shape: tuple[int, ...] | None = None
    """Of the tensor, where all members have the same."""

    def __str__(self) -> str:
        number = f" {self.number}" if self.number else ""
        shape = "" if self.shape is None else f" of {list(self.shape)}"
        return f"{self.name}{number}{shape} over {self.axis}"


@dataclass
class Operations:
    """Written by the thread that trains, read by another: every value is replaced whole."""

    last: Operation | None = None
    waiting: Operation | None = None
    moved: float = field(default_factory=time.monotonic)
    """When an operation last began or ended."""
    counts: dict[str, int] = field(default_factory=dict)
    recent: dict[str, deque[Operation]] = field(default_factory=dict)

    def began(self, name: str, axis: str, ranks: tuple[int, ...], shape: tuple[int, ...] | None) -> Operation:
        number = self.counts.get(axis, 0) + 1
        operation = Operation(name, axis, ranks, number, shape)
        self.counts[axis] = number
        self.recent.setdefault(axis, deque(maxlen=_REMEMBERED)).append(operation)
        self.last, self.moved = operation, time.monotonic()
        return operation

    @contextmanager
    def wait(self, operation: Operation) -> Iterator[None]:
        """Around a call that returns when the others have come."""
        self.waiting, self.moved = operation, time.monotonic()
        try:
            yield
        finally:
            self.waiting, self.moved = None, time.monotonic()
