"""Logs this rank's communication; the heartbeat reads the log from another thread.

Every axis of a ParallelState records the collectives that it starts, numbered per axis, and its waits. All members of
an axis start the same collectives in the same order, so equal numbers mean the same collective.
"""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

_REMEMBERED = 32


@dataclass(frozen=True)
class CommOp:
    """One collective, or a point-to-point message between pipeline stages (`number` 0)."""

    name: str
    axis: str
    ranks: Sequence[int]
    number: int = 0
    shape: tuple[int, ...] | None = None
    """Shape of the tensor, if it is the same on all members."""

    on_device: bool = False
    """True if the host waits for its device, which may be running collectives."""

    def __str__(self) -> str:
        if self.on_device:
            return self.name
        number = f" {self.number}" if self.number else ""
        shape = "" if self.shape is None else f" of {list(self.shape)}"
        return f"{self.name}{number}{shape} over {self.axis}"


@dataclass
class CommLog:
    """Collectives and waits of this rank. Another thread reads without a lock: values are replaced, never modified."""

    last: CommOp | None = None
    waiting: CommOp | None = None
    timed_out: CommOp | None = None
    """Operation for which the wait timed out."""
    watched: bool = False
    """True if a heartbeat ends this rank when another one is lost, so that waiting for a busy rank needs no limit."""
    moved: float = field(default_factory=time.monotonic)
    """Time at which an operation last started or ended."""
    counts: dict[str, int] = field(default_factory=dict)
    recent: dict[str, deque[CommOp]] = field(default_factory=dict)

    def began(self, name: str, axis: str, ranks: Sequence[int], shape: tuple[int, ...] | None) -> CommOp:
        number = self.counts.get(axis, 0) + 1
        operation = CommOp(name, axis, ranks, number, shape)
        self.counts[axis] = number
        self.recent.setdefault(axis, deque(maxlen=_REMEMBERED)).append(operation)
        self.last, self.moved = operation, time.monotonic()
        return operation

    def read_back(self, what: str) -> AbstractContextManager[None]:
        """Encloses the host's wait for its device. With nccl a collective's own wait returns at once, so a hang appears
        here."""
        return self.wait(CommOp(what, "", (0,), on_device=True))

    def wait(self, operation: CommOp) -> AbstractContextManager[None]:
        """Encloses a call that blocks until the other members take part."""
        return _Waiting(self, operation)


class _Waiting:
    """Context manager of `CommLog.wait`. A generator would be three times slower, and a small step waits 700 times."""

    __slots__ = ("_log", "_operation")

    def __init__(self, log: CommLog, operation: CommOp) -> None:
        self._log, self._operation = log, operation

    def __enter__(self) -> None:
        self._log.waiting, self._log.moved = self._operation, time.monotonic()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and is_timeout(error):
            self._log.timed_out = self._operation
        self._log.waiting, self._log.moved = None, time.monotonic()


def is_timeout(error: RuntimeError) -> bool:
    """True if a collective timed out; the backends report that only in the text of their error."""
    return "timed out" in str(error).lower() or "timeout" in str(error).lower()
