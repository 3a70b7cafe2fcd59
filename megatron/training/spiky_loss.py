"""Finds sudden rises of the loss: --check-for-spiky-loss."""

import math
from collections import deque

WINDOW = 100
"""Number of steps that a loss is compared with, as in Megatron; there they are the run's first, here the latest."""


class SpikyLoss:
    """Compares losses within this launch: the first step after a resume is not compared."""

    def __init__(self, factor: float) -> None:
        """`factor`: a loss above this multiple of the window's largest is a spike."""
        self._factor = factor
        self._window: deque[float] = deque(maxlen=WINDOW)

    def check(self, loss: float, iteration: int, first_sample: int, last_sample: int) -> str:
        """Returns the warning about this loss, or "". A non-finite loss is left to another check."""
        if not math.isfinite(loss):
            return ""
        largest = max(self._window, default=None)
        self._window.append(loss)
        if largest is None or loss <= self._factor * largest:
            return ""
        return (
            f"iteration {iteration}: the loss rose to {loss:.6g}, more than {self._factor:g} times the largest of the "
            f"{min(len(self._window) - 1, WINDOW)} losses before it ({largest:.6g}); its samples are {first_sample} to "
            f"{last_sample} of the training order (--check-for-spiky-loss)"
        )
