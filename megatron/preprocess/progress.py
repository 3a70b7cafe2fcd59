"""Shows the progress of documents on stderr: a bar on a terminal, lines elsewhere."""

import sys
import time

from megatron.utils.progress import bar_on_terminal, duration

EVERY = 1000  # documents between lines


class ProgressDisplay:
    """Shows progress. `total` is the input's bytes on disk; 0 means unknown and shows no ETA."""

    def __init__(self, total: int, log_interval: int | None, *, begun_at: int = 0) -> None:
        self._total, self._log_interval = total, log_interval or EVERY
        self._pause = 0.0 if log_interval else 1.0  # seconds between lines, unless --log-interval was given
        self._started = self._said = time.monotonic()
        self._begun_at = self.position = begun_at
        self.documents = self.tokens = self.read = 0
        self._bar = bar_on_terminal(total, begun_at)

    def update(self, *, documents: int, tokens: int, read: int, position: int) -> None:
        """Adds the work since the last call. `read`: bytes, decompressed. `position`: where the work ended, in bytes on
        disk."""
        lines_before = self.documents // self._log_interval
        self.documents += documents
        self.tokens += tokens
        self.read += read
        self.position = max(self.position, position)
        if self._bar is not None:
            self._bar.set_postfix_str(
                f"{self.documents} docs, {self._rate():.0f} docs/s{self._counted()}", refresh=False
            )
            self._bar.update(self.position - self._bar.n)
        elif self.documents // self._log_interval > lines_before and time.monotonic() - self._said >= self._pause:
            self._said = time.monotonic()
            print(self._line(), file=sys.stderr, flush=True)

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
        return f"Processed {self.documents} documents {speed}{self._counted()}{left}"

    def _counted(self) -> str:
        """The number of tokens; "" if none are made, as in the training of a tokenizer."""
        return f", {self.tokens} tokens" if self.tokens else ""

    def __enter__(self) -> "ProgressDisplay":
        return self

    def __exit__(self, *raised: object) -> None:
        if self._bar is not None:
            self._bar.close()
