"""Enlarges a kernel's arguments for a GPU. Small arguments stay in its cache, and their time is mostly the launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

ELEMENTS = 1 << 28  # of the first argument
MOST = 64  # the largest factor


def grown(args: Sequence[Any]) -> tuple[Any, ...]:
    """Repeats the rows of the first argument and of all arguments with as many rows, except float vectors."""
    first = args[0]
    if first.dim() < 2:
        return tuple(args)
    times = max(1, min(MOST, ELEMENTS // first.numel()))

    def repeated(arg: Any) -> Any:
        by_rows = isinstance(arg, Tensor) and arg.dim() > 0 and arg.shape[0] == first.shape[0]
        if not by_rows or (arg.dim() == 1 and arg.is_floating_point()):
            return arg
        return arg.repeat(times, *[1] * (arg.dim() - 1))

    return tuple(repeated(arg) for arg in args)
