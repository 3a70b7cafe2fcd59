"""Runs a function on several gloo ranks of this machine; a rank that returns nothing fails.

    def body(rank: int, size: int) -> float: ...
    results = run_ranks(4, body, 1024)        # body(rank, 1024) on ranks 0 to 3

The launcher is that of tools/check_layout.py. It forks ranks, so closures and monkeypatched bugs travel with them.
Ranks may return any value that can be pickled, except None.
"""

from __future__ import annotations

import importlib
import os
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from megatron.config.sources import canonical_spellings
from megatron.errors import PeerLostError
from megatron.ops.library import library
from megatron.prove.check_layout import ranks
from megatron.prove.check_layout.ranks import RankError

# Modules that torch imports at first use (recomputation, fp64 norms, profiles), which takes seconds. Ranks are forked
# after the import, so that no rank repeats it.
IMPORTED_LATE = ("torch._dynamo", "torch.profiler", "numpy.random")


def import_for_ranks() -> None:
    """Imports what would cost each rank a second before its first step: modules, kernels, all flags' tables."""
    for name in IMPORTED_LATE:
        importlib.import_module(name)
    library()
    canonical_spellings()


@contextmanager
def on_own_cores() -> Iterator[None]:
    """Keeps forks on their own half of the cores when two processes share the tests. gloo's threads wake each other a
    thousand times in a step. That costs a third less if none moves to another core."""
    worker = re.fullmatch(r"gw(\d+)", os.environ.get("PYTEST_XDIST_WORKER", ""))
    if worker is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    own = sorted(allowed)[int(worker[1]) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]
    os.sched_setaffinity(0, own or allowed)
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


class RankFailed(AssertionError):
    """A rank raised, died, returned nothing or did not finish in time."""


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Calls `fn(rank, *args)` on every rank with the default group initialised; returns the results by rank."""
    import_for_ranks()

    def body(rank: int) -> bytes:
        result = fn(rank, *args)
        if result is None:
            raise ValueError(f"rank {rank} returned None: return what the test compares")
        return pickle.dumps(result)

    try:
        with on_own_cores():
            results = ranks.run_ranks(world_size, body, timedelta(seconds=timeout))
    except RankError as error:
        raise RankFailed(f"rank {error.rank} failed:\n{error.calls}" if error.calls else str(error)) from None
    except PeerLostError as error:
        raise RankFailed(str(error)) from None
    return [pickle.loads(result) for result in results]
