"""Recomputation of activations in the backward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from megatron.config import RecomputeConfig


def call_with_recompute(function: Callable[..., Any], recomputed: bool, *arguments: Any) -> Any:
    """Calls `function(*arguments)`. If `recomputed` and gradients are enabled, backward calls it again instead of
    keeping its activations."""
    if not (recomputed and torch.is_grad_enabled()):
        return function(*arguments)
    # The random state is restored, so that dropout drops the same elements again.
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=True)


def groups(config: RecomputeConfig, count: int) -> list[tuple[range, bool]]:
    """Splits `count` layers into groups of consecutive layers, by the settings: (positions, True if recomputed)."""
    step = config.recompute_num_layers
    if not config.full:
        return [(range(count), False)]
    if config.recompute_method == "block":
        first = min(step, count)
        return [(range(i, i + 1), True) for i in range(first)] + [(range(first, count), False)]
    return [(range(start, min(start + step, count)), True) for start in range(0, count, step)]
