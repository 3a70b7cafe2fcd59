"""Progress display: a bar on a terminal, otherwise a line every so many documents."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, TextIO

EVERY = 1000  # documents between lines


class ProgressDisplay:
    """Shows progress. `total` is the input's bytes on disk; 0 if unknown, and then there is no ETA."""

    def __init__(
        self, total: int, log_interval: int | None, *, begun_at: int = 0, stream: TextIO | None = None
    ) -> None:
        self._stream = stream or sys.stderr
        self._total, self._log_interval = total, log_interval or EVERY
        self._pause = 0.0 if log_interval else 1.0  # seconds between lines, unless --log-interval was given
        self._started = self._said = time.monotonic()
        self._begun_at = self.position = begun_at
        self.documents = self.tokens = self.read = 0
        self._bar = self._make_bar() if self._stream.isatty() else None

    def _make_bar(self) -> Any:
        try:
            from tqdm import tqdm
        except ImportError:
            return None
        total, stream = self._total or None, self._stream
        return tqdm(total=total, initial=self._begun_at, unit="B", unit_scale=True, file=stream, dynamic_ncols=True)

    def update(self, *, documents: int, tokens: int, read: int, position: int) -> None:
        """Adds the work since the last call; `position` is where in the input it ended."""
        lines_before = self.documents // self._log_interval
        self.documents += documents
        self.tokens += tokens
        self.read += read
        self.position = max(self.position, position)
        if self._bar is not None:
            self._bar.set_postfix_str(
                f"{self.documents} docs, {self._rate():.0f} docs/s, {self.tokens} tokens", refresh=False
            )
            self._bar.update(self.position - self._bar.n)
        elif self.documents // self._log_interval > lines_before and time.monotonic() - self._said >= self._pause:
            self._said = time.monotonic()
            print(self._line(), file=self._stream, flush=True)

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self._started, 1e-9)

    @property
    def megabytes_per_second(self) -> float:
        return self.read / 1e6 / self.seconds

    def _rate(self) -> float:
        return self.documents / self.seconds

    def _line(self) -> str:
        left, done = "", self.position - self._begun_at
        if self._total and done:
            left = f", ETA {duration(self.seconds * max(self._total - self.position, 0) / done)}"
        speed = f"({self._rate():.1f} docs/s, {self.megabytes_per_second:.2f} MB/s)"
        return f"Processed {self.documents} documents {speed}, {self.tokens} tokens{left}"

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
