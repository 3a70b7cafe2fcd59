"""Updates tensor by tensor, with each parameter's rule."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.data_parallel import TrainingStore
from megatron.optimizer.decision import Decision, HostDecision
from megatron.optimizer.groups import GroupRule, Rates
from megatron.optimizer.rules import Control, Slot, Slots, UpdateRule

OptimizerState = dict[str, dict[str, Tensor]]
"""Moments by parameter name, and `master` for half-precision parameters."""


class Update(Protocol):
    """Applies rules to all pieces of a rank."""

    def step(self, decision: Decision, rates: Rates) -> None: ...

    def state(self) -> OptimizerState:
        """Returns live tensors, not copies, unless the implementation documents copies."""

    def loadable_in_place(self) -> OptimizerState:
        """Live tensors of `state()` that may be filled before they are passed to `load`, which reads before it writes.
        Tensors that `state()` computes or copies are excluded. Masters that are the model's own piece of a weight are
        excluded too, because loading the rounded weights would overwrite them."""

    def load(self, state: Mapping[str, Mapping[str, Tensor]], steps: int) -> None:
        """Restores `state()` and the number of updates; half-precision parameters are rounded from their masters."""

    def refresh_masters(self) -> None:
        """Sets the masters after the weights were changed."""


class UserUpdate(Protocol):
    """Update by the user's own optimizer, which keeps its own rates."""

    def step(self, decision: HostDecision) -> None:
        """Makes one update. Called with autograd off."""

    def state(self) -> OptimizerState: ...

    def extra(self) -> dict[str, Any]:
        """Plain values that `state` lacks."""

    def load(self, state: Mapping[str, Mapping[str, Tensor]], extra: Mapping[str, Any]) -> None:
        """Restores `state()` and `extra()`; half-precision parameters are rounded from their masters."""

    def refresh_masters(self) -> None:
        """Sets the masters after the weights were changed."""


class TorchUpdate:
    """Applies the rules to fp32 masters of half-precision parameters, and to other parameters directly."""

    def __init__(
        self,
        grads: TrainingStore,
        groups: Mapping[str, GroupRule],
        rules: Mapping[str, UpdateRule],
        *,
        asynchronous: bool = False,
    ) -> None:
        """Allocates the state. `asynchronous`: the device decides about the update; all rules must be fused."""
        assert not asynchronous or all(rule.fused for rule in rules.values()), "the device can skip only fused rules"
        self._grads, self._rules, self._asynchronous = grads, rules, asynchronous
        self._slots: dict[str, Slot] = {}
        self._halves: list[str] = []  # half-precision parameters; their pieces may have another dtype
        self._rounded: list[str] = []
        self._narrow = False  # True if gradients have a narrower dtype than their masters
        self._groups: dict[tuple[UpdateRule, GroupRule], list[str]] = {}
        for name in grads.names:
            weight = grads.weight(name)
            master = _master(weight)
            dtype = grads.grad_dtypes[name]
            self._narrow |= dtype != master.dtype
            if grads.parameter(name).dtype != master.dtype:
                self._halves.append(name)
            if master is not weight:
                self._rounded.append(name)
            self._slots[name] = rules[name].slot(name, master)
            self._groups.setdefault((rules[name], groups[name]), []).append(name)

    @torch.no_grad()
    def step(self, decision: Decision, rates: Rates) -> None:
        """Updates all pieces. Afterwards the gradient buffers hold unscaled and clipped gradients, unless their dtype
        is narrower than that of the masters."""
        if not self._asynchronous and not decision.applied:
            return
        if not self._narrow and (self._asynchronous or decision.factor != 1.0):
            self._grads.multiply(decision.factor)
        skip = (1.0 - decision.applied).float() if self._asynchronous else None
        store = Slots(self._slots, partial(self._widened, decision.factor) if self._narrow else self._grads.grad)
        for (rule, group), names in self._groups.items():
            rule.step(store, names, Control(*rates.of(group), skip))
        self._copy_back()

    def _widened(self, factor: float | Tensor, name: str) -> Tensor:
        """Returns a gradient times `factor`, in the master's dtype: the product is not rounded to half precision."""
        return self._grads.grad(name).to(self._slots[name].tensor.dtype) * factor

    def state(self) -> OptimizerState:
        """State as in a checkpoint: live tensors, unless a rule stores another form."""
        states = {name: self._rules[name].saved(slot) for name, slot in self._slots.items()}
        for name in self._halves:
            states[name]["master"] = self._slots[name].tensor
        return states

    def loadable_in_place(self) -> OptimizerState:
        found = {
            name: dict(slot.state) if self._rules[name].loads_in_place else {} for name, slot in self._slots.items()
        }
        for name in self._rounded:
            found[name]["master"] = self._slots[name].tensor
        return found

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Tensor]], steps: int) -> None:
        """Restores `state()` and the number of updates; half-precision parameters are rounded from their masters."""
        for name, slot in self._slots.items():
            self._rules[name].restore(slot, state[name])
            slot.step.fill_(steps)
        for name in self._halves:
            self._slots[name].tensor.copy_(state[name]["master"])
        self._copy_back()

    @torch.no_grad()
    def refresh_masters(self) -> None:
        for name in self._rounded:
            self._slots[name].tensor.copy_(self._grads.weight(name))

    def _copy_back(self) -> None:
        if self._rounded:
            weights = [self._grads.weight(name) for name in self._rounded]
            torch._foreach_copy_(weights, [self._slots[name].tensor for name in self._rounded])


class DecidedOnHost:
    """Update of pieces in host memory: it waits for the device's decision."""

    def __init__(self, update: Update) -> None:
        self._update = update
        self.state, self.load, self.refresh_masters = update.state, update.load, update.refresh_masters
        self.loadable_in_place = update.loadable_in_place

    def step(self, decision: Decision, rates: Rates) -> None:
        self._update.step(decision.on_host(), rates)


def _master(weight: Tensor) -> Tensor:
    if weight.dtype in (torch.float16, torch.bfloat16):
        return torch.empty_like(weight, dtype=torch.float32).copy_(weight.detach())  # keeps the strides
    return weight
