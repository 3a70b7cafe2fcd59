"""Wraps this project's update rules as a torch.optim optimizer, for other models: each parameter group has its own
rate."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megatron.optimizer.rules import Control, Slot, Slots, UpdateRule


class RuleOptimizer(torch.optim.Optimizer):
    def __init__(self, params: Iterable[Any], rule: UpdateRule, *, lr: float, weight_decay: float) -> None:
        self._rule = rule
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None, "the engine computes the loss"
        for group in self.param_groups:
            tensors = {str(number): tensor for number, tensor in enumerate(group["params"]) if tensor.grad is not None}
            if tensors:
                slots = {name: self._slot(tensor) for name, tensor in tensors.items()}
                grads = {name: tensor.grad for name, tensor in tensors.items()}
                control = Control(group["lr"], group["weight_decay"])
                self._rule.step(Slots(slots, grads.__getitem__), list(tensors), control)

    def _slot(self, tensor: Tensor) -> Slot:
        state = self.state[tensor]
        if not state:
            new = self._rule.slot("", tensor)
            state.update(new.state, step=new.step)
        return Slot("", tensor, {kind: value for kind, value in state.items() if kind != "step"}, state["step"])
