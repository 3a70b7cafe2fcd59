"""Runs a function on all ranks, or on the first one, so that an error on any rank is raised on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megatron.distributed.collectives import all_gather_object, broadcast_object
from megatron.distributed.state import Axis
from megatron.errors import CheckpointError, MegatronError

T = TypeVar("T")


def run_on_all(work: Callable[[], T], axis: Axis) -> T:
    """Runs `work` on every rank and returns this rank's result; if any rank fails, all ranks raise an error."""
    result: T | None = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:  # a bug must not leave the other ranks waiting either
        error = caught
    failures = all_gather_object(_portable(error), axis)
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            kind, text = failure
            raise kind(f"{text} (on rank {axis.ranks[rank]})")
    return result  # type: ignore[return-value]


def run_on_first(work: Callable[[], T], axis: Axis) -> T:
    """Runs `work` on the axis' first rank; every rank returns its result or raises its error."""
    result = run_on_all(lambda: work() if axis.rank == 0 else None, axis)
    return broadcast_object(result, axis)


def _portable(error: Exception | None) -> tuple[type[MegatronError], str] | None:
    if error is None:
        return None
    if isinstance(error, MegatronError):
        return type(error), str(error)
    return CheckpointError, f"{type(error).__name__}: {error}"
