"""Which activations are recomputed in the backward pass instead of being kept."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from megatron.config import RecomputeConfig


def call_with_recompute(function: Callable[..., Any], recomputed: bool, *arguments: Any) -> Any:
    """`function(*arguments)`. Without gradients nothing is kept, so nothing is recomputed."""
    if not (recomputed and torch.is_grad_enabled()):
        return function(*arguments)
    # The random state is put back, so that dropout falls on the same elements the second time.
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=True)


def groups(config: RecomputeConfig, count: int) -> list[tuple[range, bool]]:
    """Split `count` layers into runs (positions, recomputed?) that are called one after another."""
    step = config.recompute_num_layers
    if not config.full:
        return [(range(count), False)]
    if config.recompute_method == "block":
        first = min(step, count)
        return [(range(i, i + 1), True) for i in range(first)] + [(range(first, count), False)]
    return [(range(start, min(start + step, count)), True) for start in range(0, count, step)]
