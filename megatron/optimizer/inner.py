"""The update rules: torch's own AdamW and SGD, in one fused pass over memory where the device has it.

The functions behind `torch.optim`'s classes are called directly: the classes import torch's compiler at their first
use, which nearly doubles the start-up of every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

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
    """How a parameter's rates relate to those of the schedule."""

    wd_mult: float = 1.0
    lr_mult: float = 1.0


class Update(Protocol):
    """The weights of all parameters, what a rule keeps for them, and its step."""

    def step(self, decision: Decision, lr: float, weight_decay: float) -> None: ...

    def state(self) -> OptimizerState:
        """The live tensors, no copies where there is one."""

    def load(self, state: Mapping[str, Mapping[str, Tensor]], steps: int) -> None:
        """`state()` and the number of updates of another run; the parameters follow their masters."""

    def refresh_masters(self) -> None:
        """After weights were loaded without the optimizer's state."""


@dataclass
class Slot:
    """One tensor that is updated, and what the rule keeps for it."""

    tensor: Tensor
    state: dict[str, Tensor]
    step: Tensor
    """The number of updates, where the fused kernels want it."""


class UpdateRule(Protocol):
    """Changes tensors by their gradients."""

    @property
    def fused(self) -> bool: ...

    def slot(self, tensor: Tensor) -> Slot:
        """The state before the first step. Made at once: memory is known then, and a checkpoint has a place to go."""

    def update(
        self, slots: Sequence[Slot], grads: list[Tensor], lr: float, weight_decay: float, skip: Tensor | None = None
    ) -> None:
        """`skip`: a device's number that forbids the update unless it is 0; for fused rules."""


@dataclass(frozen=True)
class Adam:
    """AdamW: the decay is taken off the weights, not added to the gradient."""

    beta1: float
    beta2: float
    eps: float
    fused: bool

    def slot(self, tensor: Tensor) -> Slot:
        state = {name: torch.zeros_like(tensor, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
        return Slot(tensor, state, torch.zeros((), device=tensor.device if self.fused else "cpu"))

    def update(
        self, slots: Sequence[Slot], grads: list[Tensor], lr: float, weight_decay: float, skip: Tensor | None = None
    ) -> None:
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
    """SGD with momentum; its decay is added to the gradient, as in Megatron."""

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


class TorchUpdate:
    """A rule applied to one tensor for every parameter: fp32 masters of half-precision ones, others themselves."""

    def __init__(
        self, grads: GradBuffers, rules: Mapping[str, GroupRule], rule: UpdateRule, *, asynchronous: bool = False
    ) -> None:
        """`asynchronous`: whether a step is made is known to the device alone; for fused rules."""
        assert rule.fused or not asynchronous, "a rule that is not fused runs where the host decides"
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
        """Afterwards the buffers hold the gradients that were applied."""
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
        states = {name: dict(slot.state) for name, slot in self._slots.items()}
        for name in self._halves:
            states[name]["master"] = self._slots[name].tensor
        return states

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Tensor]], steps: int) -> None:
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
    if config.optimizer == "adam":
        check_betas(config)
        adam = Adam(config.adam_beta1, config.adam_beta2, config.adam_eps, fused=True)
        return adam if runs_on(adam, device) else Adam(adam.beta1, adam.beta2, adam.eps, fused=False)
    if config.optimizer == "sgd":
        plain = Sgd(config.sgd_momentum, fused=True)
        return plain if runs_on(plain, device) else Sgd(plain.momentum, fused=False)
    raise ConfigError(f"--optimizer {config.optimizer}: not supported; use adam or sgd")


def check_betas(config: OptimizerConfig) -> None:
    for flag, beta in (("--adam-beta1", config.adam_beta1), ("--adam-beta2", config.adam_beta2)):
        if not 0.0 <= beta < 1.0:
            raise ConfigError(f"{flag} {beta}: must be at least 0 and below 1")


def runs_on(rule: UpdateRule, device: torch.device) -> bool:
    """Whether this torch has the rule's kernel for the device: found by an update of one element."""
    probe = torch.zeros(1, device=device)
    try:
        rule.update([rule.slot(probe)], [torch.zeros_like(probe)], 0.1, 0.0)
    except (RuntimeError, NotImplementedError):
        return False
    return True
