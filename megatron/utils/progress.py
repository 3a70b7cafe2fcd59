"""Progress in bytes on stderr: a bar on a terminal, a line every few seconds elsewhere."""

import sys
import time
from typing import Any

from megatron.utils.log import print_line

BYTES_PAUSE = 5.0  # seconds between lines about bytes


def bar_on_terminal(total: int, begun_at: int = 0, verb: str | None = None, unit: str = "B") -> Any:
    """Returns a progress bar, or None if stderr is not a terminal. A `total` of 0 is unknown."""
    if not sys.stderr.isatty():
        return None
    from tqdm import tqdm

    return tqdm(total=total or None, initial=begun_at, desc=verb, unit=unit, unit_scale=True, dynamic_ncols=True)


class ByteProgress:
    """Shows bytes, speed and time left."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._started = self._said = time.monotonic()
        self._bar: Any = None

    def show(self, done: int, total: int) -> None:
        """Shows that `done` bytes of `total` are done. `done` must not fall between calls."""
        if self._bar is None and done < total:
            self._bar = bar_on_terminal(total, verb=self._verb)
        if self._bar is None:
            self._line(done, total)
            return
        self._bar.update(done - self._bar.n)
        if done >= total:
            self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _line(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._said < BYTES_PAUSE or done >= total:
            return
        self._said = now
        speed = done / (now - self._started)
        left = duration((total - done) / speed if speed else 0)
        read = f"{self._verb} {done / 1e9:.2f} of {total / 1e9:.2f} GB"
        print_line(f"{read} ({speed / 1e6:.0f} MB/s, {left} left)", sys.stderr)


def duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
