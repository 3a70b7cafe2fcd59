"""Rows of tokens with predictions to score, and the cut of a long text into such rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.errors import ConfigError

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Scored:
    """Row of which the model reads `tokens[:-1]`; its predictions of `tokens[first:]` are scored."""

    tokens: Tokens
    first: int

    def __post_init__(self) -> None:
        assert 1 <= self.first < len(self.tokens), f"{len(self.tokens)} tokens, scored from {self.first} on"

    @property
    def length(self) -> int:
        """Number of positions that the model reads."""
        return len(self.tokens) - 1

    @property
    def count(self) -> int:
        """Number of scored predictions."""
        return len(self.tokens) - self.first


def continuation(context: Sequence[int], target: Sequence[int]) -> Scored:
    """Makes a row that scores the target after its context, which has at least one token."""
    return Scored(np.array([*context, *target], dtype=np.int64), len(context))


def windows(tokens: Tokens, window: int, stride: int) -> Iterator[Scored]:
    """Yields windows at the given stride that score every token but the first once. All windows but the first score
    only their new tokens, which have at least `window - stride` tokens of context."""
    if not 1 <= stride <= window:
        raise ConfigError(f"--overlapping-eval {stride}: must be from 1 to the window of {window} tokens")
    last, scored = len(tokens) - 1, 0
    for start in range(0, max(last, 0), stride):
        stop = min(start + window, last)
        yield Scored(tokens[start : stop + 1], scored + 1 - start)
        scored = stop
        if stop == last:
            return
