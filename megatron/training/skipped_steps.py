"""Counts the steps that were skipped because of an overflow.

A dynamic loss scale causes a few; with many, the model does not learn.
"""

SHARE = 0.1
"""Fraction of skipped steps below which there is no warning."""
SEARCH = 50
"""Number of steps in which a dynamic scale may still fall from its initial value; 2**32 is halved 32 times at most."""


class SkippedSteps:
    """Counts within this launch. Iterations skipped by --iterations-to-skip are not counted."""

    def __init__(self) -> None:
        self._steps = self._skipped = 0
        self._steps_told = self._skipped_told = 0
        self._told = False  # only the first of several bad intervals in a row gets a warning
        self._scale = 1.0

    def count(self, skipped: bool, loss_scale: float) -> None:
        self._steps += 1
        self._skipped += skipped
        self._scale = loss_scale

    def since_last_asked(self) -> str:
        """Returns the warning about the steps since the last call, if one is due."""
        steps, skipped = self._steps - self._steps_told, self._skipped - self._skipped_told
        self._steps_told, self._skipped_told = self._steps, self._skipped
        many = self._steps > SEARCH and _many(skipped, steps)
        due, self._told = many and not self._told, many
        return f"since the last line, {self._line(skipped, steps)}" if due else ""

    def of_the_run(self) -> str:
        if not _many(self._skipped, self._steps):
            return ""
        line = self._line(self._skipped, self._steps)
        return f"{line}: nothing was learnt" if self._skipped == self._steps else line

    def _line(self, skipped: int, steps: int) -> str:
        return (
            f"{skipped} of {steps} steps were skipped, because their gradients were not finite (loss scale now "
            f"{self._scale:g}; change --initial-loss-scale or --lr, or use --bf16)"
        )


def _many(skipped: int, steps: int) -> bool:
    return skipped > 0 and skipped >= SHARE * steps
