"""A bounded number of mapped files: a map holds a descriptor, and a process may have only so many of either."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np

from megatron.errors import DataError


class MapPool:
    """The files read last stay mapped. What was handed out stays valid: it holds its own map."""

    def __init__(self, limit: int) -> None:
        assert limit > 0
        self.limit = limit
        self._mapped: OrderedDict[Path, np.ndarray] = OrderedDict()

    def __len__(self) -> int:
        return len(self._mapped)

    def tokens(self, path: Path, dtype: np.dtype, size: int) -> np.ndarray:
        """The whole file, of `size` bytes, for reading."""
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
