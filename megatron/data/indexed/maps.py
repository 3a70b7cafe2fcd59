"""Bounds the number of mapped files, because a process has limited maps and descriptors."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np

from megatron.errors import DataError


class MapPool:
    """Keeps the most recently read files mapped. Arrays already handed out stay valid: they hold their map."""

    def __init__(self, limit: int) -> None:
        assert limit > 0
        self.limit = limit
        self._mapped: OrderedDict[Path, np.ndarray] = OrderedDict()

    def __len__(self) -> int:
        return len(self._mapped)

    def tokens(self, path: Path, dtype: np.dtype, size: int) -> np.ndarray:
        """A read-only view of the whole file of `size` bytes."""
        found = self._mapped.get(path)
        if found is None:
            found = self._map(path, dtype, size)
            if len(self._mapped) > self.limit:
                self._mapped.popitem(last=False)
        else:
            self._mapped.move_to_end(path)
        return found

    def _map(self, path: Path, dtype: np.dtype, size: int) -> np.ndarray:
        try:
            mapped = np.memmap(path, mode="r", dtype=dtype).view(np.ndarray)
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: gone or cut while it was in use ({error}); restore it and resume") from error
        if mapped.nbytes != size:
            raise DataError(
                f"{path}: {mapped.nbytes} bytes, and {size} when it was opened: it was changed while in use"
            )
        self._mapped[path] = mapped
        return mapped
