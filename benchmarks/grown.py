"""Arguments of a kernel made as large as a GPU needs them: smaller ones stay in its cache, and what is measured is the
time to launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

ELEMENTS = 1 << 28  # that the first argument should have
MOST = 64  # times what it was


def grown(args: Sequence[Any]) -> tuple[Any, ...]:
    """The first argument's rows, and those of whatever has as many, several times over. Vectors of numbers stay."""
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
