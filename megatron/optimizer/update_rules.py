"""The update rules: torch's own AdamW and SGD, in one fused pass over memory where the device has it.

The functions behind `torch.optim`'s classes are called directly: the classes import torch's compiler at their first
use, which nearly doubles the start-up of every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron.config.sections.optimizer import OptimizerConfig
from megatron.data_parallel import GradBuffers
from megatron.errors import ConfigError
from megatron.optimizer.decision import Decision

OptimizerState = dict[str, dict[str, Tensor]]
"""Per parameter name: its moments, and `master` for half-precision parameters."""


@dataclass(frozen=True)
class GroupRule:
    """Factors of a parameter group on the schedule's learning rate and weight decay."""

    wd_mult: float = 1.0
    lr_mult: float = 1.0


@dataclass
class Slot:
    """One tensor that is updated, and its optimizer state."""

    tensor: Tensor
    state: dict[str, Tensor]
    step: Tensor
    """The number of updates, on the device where the fused kernels need it there."""


@dataclass(frozen=True)
class Adam:
    """AdamW: weight decay is decoupled from the gradient."""

    beta1: float
    beta2: float
    eps: float
    fused: bool

    def slot(self, tensor: Tensor) -> Slot:
        """The state before the first step. Allocated now, so that memory is known and a checkpoint can be loaded."""
        state = {name: torch.zeros_like(tensor, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
        return Slot(tensor, state, torch.zeros((), device=tensor.device if self.fused else "cpu"))

    def update(
        self, slots: Sequence[Slot], grads: list[Tensor], lr: float, weight_decay: float, skip: Tensor | None = None
    ) -> None:
        """`skip`: a number on the device; unless it is 0 the update is not made. For fused rules."""
        adamw(
            [slot.tensor for slot in slots],
            grads,
            [slot.state["exp_avg"] for slot in slots],
            [slot.state["exp_avg_sq"] for slot in slots],
            [],
            [slot.step for slot in slots],
            fused=self.fused,
            foreach=not self.fused,
            found_inf=skip,
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
    """SGD with momentum; weight decay is added to the gradient, as in Megatron."""

    momentum: float
    fused: bool

    def slot(self, tensor: Tensor) -> Slot:
        state = {"momentum_buffer": torch.zeros_like(tensor, requires_grad=False)} if self.momentum else {}
        return Slot(tensor, state, torch.zeros(()))

    def update(
        self, slots: Sequence[Slot], grads: list[Tensor], lr: float, weight_decay: float, skip: Tensor | None = None
    ) -> None:
        sgd(
            [slot.tensor for slot in slots],
            grads,
            [slot.state.get("momentum_buffer") for slot in slots],
            fused=self.fused,
            foreach=not self.fused,
            found_inf=skip,
            weight_decay=weight_decay,
            momentum=self.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


UpdateRule = Adam | Sgd


class TorchUpdate:
    """Applies a rule tensor by tensor: to fp32 masters of half-precision parameters, and to others directly."""

    def __init__(
        self, grads: GradBuffers, rules: Mapping[str, GroupRule], rule: UpdateRule, *, asynchronous: bool = False
    ) -> None:
        """`asynchronous`: the device decides whether the update is made; for fused rules."""
        assert rule.fused or not asynchronous, "only a fused rule can be skipped by the device"
        self._grads, self._rule, self._asynchronous = grads, rule, asynchronous
        self._slots: dict[str, Slot] = {}
        self._halves: list[str] = []
        self._groups: dict[GroupRule, list[str]] = {}
        for name in grads.names:
            parameter = grads.parameter(name)
            master = _master(parameter)
            dtype = grads.grad_dtype(name)
            assert dtype == master.dtype, f"the gradient of {name} is {dtype}, its master {master.dtype}"
            if master is not parameter:
                self._halves.append(name)
            self._slots[name] = rule.slot(master)
            self._groups.setdefault(rules[name], []).append(name)

    @torch.no_grad()
    def step(self, decision: Decision, lr: float, weight_decay: float) -> None:
        """Afterwards the buffers hold the unscaled and clipped gradients."""
        if not self._asynchronous and not decision.applied:
            return
        if self._asynchronous or decision.factor != 1.0:
            self._grads.multiply(decision.factor)
        skip = (1.0 - decision.applied).float() if self._asynchronous else None
        for rule, names in self._groups.items():
            slots, grads = [self._slots[name] for name in names], [self._grads.grad(name) for name in names]
            self._rule.update(slots, grads, lr * rule.lr_mult, weight_decay * rule.wd_mult, skip)
        self._copy_back()

    def state(self) -> OptimizerState:
        """The live tensors, not copies."""
        states = {name: dict(slot.state) for name, slot in self._slots.items()}
        for name in self._halves:
            states[name]["master"] = self._slots[name].tensor
        return states

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Tensor]], steps: int) -> None:
        """Restores `state()` and the number of updates; half-precision parameters are rounded from their masters."""
        for name, tensors in self.state().items():
            for key, tensor in tensors.items():
                tensor.copy_(state[name][key])
        for slot in self._slots.values():
            slot.step.fill_(steps)
        self._copy_back()

    @torch.no_grad()
    def refresh_masters(self) -> None:
        for name in self._halves:
            self._slots[name].tensor.copy_(self._grads.parameter(name))

    def _copy_back(self) -> None:
        if self._halves:
            params = [self._grads.parameter(name).data for name in self._halves]
            torch._foreach_copy_(params, [self._slots[name].tensor for name in self._halves])


def _master(parameter: nn.Parameter) -> Tensor:
    if parameter.dtype in (torch.float16, torch.bfloat16):
        return parameter.detach().float().clone(memory_format=torch.contiguous_format)
    return parameter


def build_rule(config: OptimizerConfig, device: torch.device) -> UpdateRule:
    """Fused if this torch has the fused kernel for the device."""
    rule: UpdateRule
    if config.optimizer == "adam":
        rule = Adam(config.adam_beta1, config.adam_beta2, config.adam_eps, fused=True)
    elif config.optimizer == "sgd":
        rule = Sgd(config.sgd_momentum, fused=True)
    else:
        raise ConfigError(f"--optimizer {config.optimizer}: not supported; use adam or sgd")
    return rule if runs_on(rule, device) else replace(rule, fused=False)


def runs_on(rule: UpdateRule, device: torch.device) -> bool:
    """Whether this torch has the rule's kernel for the device; tried with an update of one element."""
    probe = torch.zeros(1, device=device)
    try:
        rule.update([rule.slot(probe)], [torch.zeros_like(probe)], 0.1, 0.0)
    except (RuntimeError, NotImplementedError):
        return False
    return True
