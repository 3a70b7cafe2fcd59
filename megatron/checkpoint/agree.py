"""All ranks come to one result: an error on any of them is an error, the same one, on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megatron.distributed.collectives import all_gather_object, broadcast_object
from megatron.distributed.state import Axis
from megatron.errors import CheckpointError, MegatronError

T = TypeVar("T")


def run_together(work: Callable[[], T], axis: Axis) -> T:
    """Do `work` on every rank and return this rank's result, or raise the first failing rank's error on all of them."""
    result: T | None = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:  # a mistake of our own must not leave the other ranks waiting either
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
    """Do `work` on the axis' first rank; every rank gets its result or its error."""
    result = run_together(lambda: work() if axis.rank == 0 else None, axis)
    return broadcast_object(result, axis)


def _portable(error: Exception | None) -> tuple[type[MegatronError], str] | None:
    if error is None:
        return None
    if isinstance(error, MegatronError):
        return type(error), str(error)
    return CheckpointError, f"{type(error).__name__}: {error}"
