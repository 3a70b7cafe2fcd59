"""Shows the progress of an evaluation on stderr: a bar on a terminal, a line every few seconds elsewhere."""

import sys
import time

from megatron.utils.log import print_line
from megatron.utils.progress import bar_on_terminal

PAUSE = 10.0
"""Seconds between lines."""


class TokenProgress:
    """Counts the tokens that the model has read on all ranks. Only the rank with `main` shows the count."""

    def __init__(self, total: int, *, main: bool) -> None:
        self.total, self.done = total, 0
        self.started = self._said = time.monotonic()
        self._main = main
        self._bar = bar_on_terminal(total, unit="tok") if main else None

    def add(self, tokens: int) -> None:
        self.done += tokens
        if self._bar is not None:
            self._bar.update(tokens)
        elif self._main and time.monotonic() - self._said >= PAUSE:
            self._said = time.monotonic()
            left = (self.total - self.done) / self.tokens_per_second
            speed = f"{self.tokens_per_second:.0f} tokens/s"
            print_line(f"{self.done} of {self.total} tokens ({speed}, {left:.0f} s left)", sys.stderr)

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self.started, 1e-9)

    @property
    def tokens_per_second(self) -> float:
        return self.done / self.seconds

    def __enter__(self) -> "TokenProgress":
        return self

    def __exit__(self, *raised: object) -> None:
        if self._bar is not None:
            self._bar.close()
