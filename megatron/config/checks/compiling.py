"""What --compile cannot be combined with: only layers that one rank computes alone and once are compiled."""

from __future__ import annotations

from megatron.config.notices import spelled
from megatron.config.run import RunConfig
from megatron.errors import ConfigError

_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)


def check_compile(config: RunConfig) -> None:
    if not config.kernels.compile:
        return
    others = [spelled(config, name) for name in _SIZES if getattr(config.parallel, name) > 1]
    if config.recompute.full or config.recompute.selective:
        others.append("recomputation")
    if config.moe.is_on:
        others.append(spelled(config, "num_experts"))
    if others:
        raise ConfigError(f"--compile cannot be combined with {others[0]} yet; leave --compile out")


CHECKS = (check_compile,)
