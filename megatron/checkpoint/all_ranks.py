"""Runs a function on all ranks, or on the first one, so that an error on any rank is raised on all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from megatron import errors
from megatron.checkpoint.verify import DamagedCheckpointError
from megatron.distributed.messages import all_gather_json, broadcast_json
from megatron.distributed.parallel_state import Axis
from megatron.errors import CheckpointError, MegatronError

T = TypeVar("T")

_TOLD = {
    kind.__name__: kind
    for kind in (
        DamagedCheckpointError,  # all ranks fall back to an older step together
        *(errors.ConfigError, errors.DataError, errors.CheckpointError, errors.StorageError, errors.NonFiniteError),
        *(errors.ReplicaError, errors.HangError, errors.PeerLostError, errors.MemoryShortError),
        *(errors.NoProgressError, errors.InterruptError, MegatronError),
    )
}
"""Errors that are raised again on the other ranks, by name."""


@dataclass(frozen=True)
class _Outcome:
    """Outcome of `work` on one rank: the name of its error in `_TOLD` and the error's text; both empty on success."""

    error: str = ""
    text: str = ""


def run_on_all(work: Callable[[], T], axis: Axis) -> T:
    """Runs `work` on every rank and returns this rank's result. If any rank fails, all ranks raise an error. A rank may
    take any time: the others wait for it, and the heartbeat detects lost ranks."""
    result: T | None = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:  # a bug must not leave the other ranks waiting either
        error = caught
    outcomes = all_gather_json(_outcome(error), axis, _Outcome, after_work=True)
    if error is not None:
        raise error
    for rank, outcome in enumerate(outcomes):
        if outcome.error:
            raise _TOLD.get(outcome.error, CheckpointError)(f"{outcome.text} (on rank {axis.ranks[rank]})")
    return result  # type: ignore[return-value]


def run_on_first(work: Callable[[], T], axis: Axis, kind: type[T]) -> T:
    """Runs `work` on the axis' first rank. All ranks return the result, of type `kind`, or raise the error."""
    return broadcast_json(run_on_all(lambda: work() if axis.rank == 0 else None, axis), axis, kind)


def do_on_first(work: Callable[[], object], axis: Axis) -> None:
    """Runs `work` on the axis' first rank and ignores its result. If it fails, all ranks raise the error."""
    run_on_all(lambda: work() if axis.rank == 0 else None, axis)


def share(identify: Callable[[], str], world: Axis) -> tuple[int, int]:
    """Returns (index of this rank, number of ranks) among the ranks that see the same files. `identify` returns an id
    that is equal for the same files."""
    seen = all_gather_json(run_on_all(identify, world), world, str)
    sharing = [rank for rank, each in enumerate(seen) if each == seen[world.rank]]
    return sharing.index(world.rank), len(sharing)


def _outcome(error: Exception | None) -> _Outcome:
    if error is None:
        return _Outcome()
    if not isinstance(error, MegatronError):
        return _Outcome(CheckpointError.__name__, f"{type(error).__name__}: {error}")
    return _Outcome(next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _TOLD), str(error))
