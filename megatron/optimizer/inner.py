"""The update rules: torch's own AdamW and SGD, with one fused pass over memory where the device has it."""

from __future__ import annotations

from typing import Any

import torch

from megatron.config.sections.optimizer import OptimizerConfig
from megatron.errors import ConfigError

STATE_NAMES = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
"""The tensors that each rule keeps for a parameter."""


def build_inner(
    config: OptimizerConfig, groups: list[dict[str, Any]], device: torch.device
) -> torch.optim.AdamW | torch.optim.SGD:
    """The rule over parameter groups; their `lr` and `weight_decay` are set anew before every step."""
    if config.optimizer == "adam":
        for flag, beta in (("--adam-beta1", config.adam_beta1), ("--adam-beta2", config.adam_beta2)):
            if not 0.0 <= beta < 1.0:
                raise ConfigError(f"{flag} {beta}: must be at least 0 and below 1")
        betas = (config.adam_beta1, config.adam_beta2)
        fused = supports_fused(torch.optim.AdamW, device)
        adam = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.adam_eps, weight_decay=0.0, fused=fused)
        _start_adam(adam, fused)
        return adam
    if config.optimizer == "sgd":
        sgd = torch.optim.SGD(
            groups,
            lr=0.0,
            momentum=config.sgd_momentum,
            weight_decay=0.0,
            fused=supports_fused(torch.optim.SGD, device),
        )
        if config.sgd_momentum:
            for parameter in _parameters(sgd):
                sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return sgd
    raise ConfigError(f"--optimizer {config.optimizer}: not supported; use adam or sgd")


def _start_adam(adam: torch.optim.AdamW, fused: bool) -> None:
    """Makes the moments now, not at the first step: memory is known then, and a checkpoint has a place to go."""
    for parameter in _parameters(adam):
        step_device = parameter.device if fused else torch.device("cpu")
        adam.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=step_device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def supports_fused(rule: type[torch.optim.AdamW] | type[torch.optim.SGD], device: torch.device) -> bool:
    """Whether this torch has the fused kernel for the device: found by a step of one element."""
    probe = torch.nn.Parameter(torch.zeros(1, device=device))
    probe.grad = torch.zeros_like(probe)
    try:
        rule([probe], lr=0.1, fused=True).step()
    except (RuntimeError, NotImplementedError):
        return False
    return True
