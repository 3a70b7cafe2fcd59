"""The sliding window of attention, in the numbers of config.json."""

from __future__ import annotations

from megatron.config import ModelConfig


def window_width(config: ModelConfig) -> int | None:
    """Theirs counts the query's own token, ours does not."""
    return None if config.window is None else config.window[0] + 1


def window_of(width: int | None) -> tuple[int, int] | None:
    return None if width is None else (int(width) - 1, 0)
