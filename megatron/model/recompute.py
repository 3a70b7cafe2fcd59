"""Which activations are recomputed in the backward pass instead of being kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from megatron.config import RecomputeConfig
from megatron.errors import ConfigError

Wrapper = Callable[..., Any]
"""(function, *tensors) -> its result."""


def checkpoint(function: Callable[..., Any], *arguments: Any) -> Any:
    """torch's, with the random state put back so that dropout falls on the same elements the second time."""
    return torch_checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=True)


def when_training(function: Callable[..., Any], *arguments: Any) -> Any:
    return checkpoint(function, *arguments) if torch.is_grad_enabled() else function(*arguments)


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


@dataclass(frozen=True)
class Recompute:
    """The plan: layers per chunk (uniform), how many first layers (block), or parts of a layer (selective)."""

    method: str = "none"  # none, uniform, block, selective
    num_layers: int = 1
    modules: frozenset[str] = frozenset()

    @classmethod
    def of(cls, config: RecomputeConfig | None) -> Recompute:
        if config is None:
            return cls()
        if config.full:
            return cls(config.recompute_method or "uniform", config.recompute_num_layers)
        if config.selective:
            modules = frozenset(config.recompute_modules or ("core_attn",))
            unknown = modules - {"core_attn", "mlp"}
            if unknown:
                raise ConfigError(
                    f"--recompute-modules {' '.join(sorted(unknown))}: not supported; use core_attn and/or mlp"
                )
            return cls("selective", modules=modules)
        return cls()

    def wrapper(self, module: str) -> Wrapper:
        """How a layer calls its part `module`."""
        if self.method != "selective" or module not in self.modules:
            return call
        return when_training

    def groups(self, count: int) -> list[tuple[range, bool]]:
        """Split `count` layers into runs (positions, recomputed?) that are called one after another."""
        if self.method == "uniform":
            step = self.num_layers
            return [(range(start, min(start + step, count)), True) for start in range(0, count, step)]
        if self.method == "block":
            first = min(self.num_layers, count)
            return [(range(i, i + 1), True) for i in range(first)] + [(range(first, count), False)]
        return [(range(count), False)]

    def run(self, function: Callable[..., Any], recomputed: bool, *arguments: Any) -> Any:
        return when_training(function, *arguments) if recomputed else function(*arguments)
