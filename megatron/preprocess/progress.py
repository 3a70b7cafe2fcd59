"""The live display: a bar on a terminal, a line every so many documents elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, TextIO


class Progress:
    """`total` is in input bytes as they lie on disk; 0 when it is not known, and then there is no ETA."""

    def __init__(self, total: int, log_interval: int, *, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._total, self._log_interval = total, log_interval
        self._started = time.monotonic()
        self.documents = self.tokens = self.read = 0
        self._bar = self._make_bar() if self._stream.isatty() else None

    def _make_bar(self) -> Any:
        try:
            from tqdm import tqdm
        except ImportError:
            return None
        return tqdm(total=self._total or None, unit="B", unit_scale=True, file=self._stream, dynamic_ncols=True)

    def update(self, *, documents: int, tokens: int, read: int, position: int) -> None:
        """After a chunk: what it held, and where in the input it ended."""
        lines_before = self.documents // self._log_interval
        self.documents += documents
        self.tokens += tokens
        self.read += read
        if self._bar is not None:
            self._bar.set_postfix_str(
                f"{self.documents} docs, {self._rate():.0f} docs/s{self._tokens()}", refresh=False
            )
            self._bar.update(position - self._bar.n)
        elif self.documents // self._log_interval > lines_before:
            print(self._line(position), file=self._stream, flush=True)

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self._started, 1e-9)

    @property
    def megabytes_per_second(self) -> float:
        return self.read / 1e6 / self.seconds

    def _rate(self) -> float:
        return self.documents / self.seconds

    def _tokens(self) -> str:
        return f", {self.tokens} tokens" if self.tokens else ""

    def _line(self, position: int) -> str:
        left = ""
        if self._total and position:
            left = f", ETA {duration(self.seconds * max(self._total - position, 0) / position)}"
        speed = f"({self._rate():.1f} docs/s, {self.megabytes_per_second:.2f} MB/s)"
        return f"Processed {self.documents} documents {speed}{self._tokens()}{left}"

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
