"""Runs a function on several gloo ranks of this machine; a rank that returns nothing fails.

    def body(rank: int, size: int) -> float: ...
    results = run_ranks(4, body, 1024)        # body(rank, 1024) on ranks 0 to 3

The launcher is that of tools/check_layout.py: forked ranks, so closures and monkeypatched bugs travel with them. Here
they return any value that can be pickled, but not None.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from megatron.errors import PeerLostError
from megatron.training.check_layout import ranks
from megatron.training.check_layout.ranks import RankError

# What torch imports when first needed (recomputation, norms in fp64, profiles): seconds, which every rank of every test
# would spend again. Ranks are forked, so that what is imported once here is there in all of them.
IMPORTED_LATE = ("torch._dynamo", "torch.profiler", "numpy.random")


def import_for_ranks() -> None:
    for name in IMPORTED_LATE:
        importlib.import_module(name)


class RankFailed(AssertionError):
    """A rank raised, died, returned nothing or did not finish in time."""


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Calls `fn(rank, *args)` on every rank with the default group initialised; the results, by rank."""
    import_for_ranks()

    def body(rank: int) -> bytes:
        result = fn(rank, *args)
        if result is None:
            raise ValueError(f"rank {rank} returned None: return what the test compares")
        return pickle.dumps(result)

    try:
        results = ranks.run_ranks(world_size, body, timedelta(seconds=timeout))
    except RankError as error:
        raise RankFailed(f"rank {error.rank} failed:\n{error.calls}" if error.calls else str(error)) from None
    except PeerLostError as error:
        raise RankFailed(str(error)) from None
    return [pickle.loads(result) for result in results]
