"""The update rules: torch's own AdamW and SGD, in one fused pass over memory where the device has it.

The functions behind `torch.optim`'s classes are called directly: the classes import torch's compiler at their first
use, which nearly doubles the start-up of every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron.config.sections.optimizer import OptimizerConfig
from megatron.errors import ConfigError


@dataclass
class Slot:
    """One tensor that is updated, and what the rule keeps for it."""

    tensor: torch.Tensor
    state: dict[str, torch.Tensor]
    step: torch.Tensor
    """The number of updates, where the fused kernels want it."""


class UpdateRule(Protocol):
    """Changes tensors by their gradients."""

    def slot(self, tensor: torch.Tensor) -> Slot:
        """The state before the first step. Made at once: memory is known then, and a checkpoint has a place to go."""

    def update(self, slots: Sequence[Slot], grads: list[torch.Tensor], lr: float, weight_decay: float) -> None: ...


@dataclass(frozen=True)
class Adam:
    """AdamW: the decay is taken off the weights, not added to the gradient."""

    beta1: float
    beta2: float
    eps: float
    fused: bool

    def slot(self, tensor: torch.Tensor) -> Slot:
        state = {name: torch.zeros_like(tensor, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
        return Slot(tensor, state, torch.zeros((), device=tensor.device if self.fused else "cpu"))

    def update(self, slots: Sequence[Slot], grads: list[torch.Tensor], lr: float, weight_decay: float) -> None:
        adamw(
            [slot.tensor for slot in slots],
            grads,
            [slot.state["exp_avg"] for slot in slots],
            [slot.state["exp_avg_sq"] for slot in slots],
            [],
            [slot.step for slot in slots],
            fused=self.fused,
            foreach=not self.fused,
            amsgrad=False,
            beta1=self.beta1,
            beta2=self.beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=self.eps,
            maximize=False,
        )


@dataclass(frozen=True)
class Sgd:
    """SGD with momentum; its decay is added to the gradient, as in Megatron."""

    momentum: float
    fused: bool

    def slot(self, tensor: torch.Tensor) -> Slot:
        state = {"momentum_buffer": torch.zeros_like(tensor, requires_grad=False)} if self.momentum else {}
        return Slot(tensor, state, torch.zeros(()))

    def update(self, slots: Sequence[Slot], grads: list[torch.Tensor], lr: float, weight_decay: float) -> None:
        sgd(
            [slot.tensor for slot in slots],
            grads,
            [slot.state.get("momentum_buffer") for slot in slots],
            fused=self.fused,
            foreach=not self.fused,
            weight_decay=weight_decay,
            momentum=self.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        torch._foreach_add_([slot.step for slot in slots], 1)


def build_rule(config: OptimizerConfig, device: torch.device) -> UpdateRule:
    if config.optimizer == "adam":
        for flag, beta in (("--adam-beta1", config.adam_beta1), ("--adam-beta2", config.adam_beta2)):
            if not 0.0 <= beta < 1.0:
                raise ConfigError(f"{flag} {beta}: must be at least 0 and below 1")
        adam = Adam(config.adam_beta1, config.adam_beta2, config.adam_eps, fused=True)
        return adam if runs_on(adam, device) else Adam(adam.beta1, adam.beta2, adam.eps, fused=False)
    if config.optimizer == "sgd":
        plain = Sgd(config.sgd_momentum, fused=True)
        return plain if runs_on(plain, device) else Sgd(plain.momentum, fused=False)
    raise ConfigError(f"--optimizer {config.optimizer}: not supported; use adam or sgd")


def runs_on(rule: UpdateRule, device: torch.device) -> bool:
    """Whether this torch has the rule's kernel for the device: found by an update of one element."""
    probe = torch.zeros(1, device=device)
    try:
        rule.update([rule.slot(probe)], [torch.zeros_like(probe)], 0.1, 0.0)
    except (RuntimeError, NotImplementedError):
        return False
    return True
