"""What a checkpoint holds besides tensors: counters, schedules, random states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.errors import CheckpointError, MegatronError


@contextmanager
def saved_values(what: str, step: Path, way_out: str) -> Iterator[None]:
    """Wraps the reading and restoring of a checkpoint's plain values: those that no run saves become an error that
    names them. Checksums cannot tell, since a forger computes them too. A RuntimeError stays, which a lost
    peer may have caused."""
    try:
        yield
    except MegatronError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(f"{step}: its {what} cannot be restored ({reason}); {way_out}") from error
