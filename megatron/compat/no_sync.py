"""`no_sync()` of the wrappers that average gradients within the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class NoSync:
    _syncs = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forward passes inside, and their backward passes, only add up this rank's gradients."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before
