"""What a checkpoint holds besides tensors: counters, schedules, random states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.errors import CheckpointError, MegatronError


@contextmanager
def saved_values(what: str, step: Path, way_out: str) -> Iterator[None]:
    """For reading and restoring them. Checksums say that they are what was written, not who wrote them: other values
    than a run saves are told by name. A RuntimeError is left alone: it may be a lost peer's."""
    try:
        yield
    except MegatronError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(f"{step}: its {what} cannot be restored ({reason}); {way_out}") from error
