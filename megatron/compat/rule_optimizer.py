"""Our update rules as a torch.optim optimizer: parameter groups with rates of their own, for models that are not
ours."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megatron.optimizer.rules import Slot, UpdateRule


class RuleOptimizer(torch.optim.Optimizer):
    def __init__(self, params: Iterable[Any], rule: UpdateRule, *, lr: float, weight_decay: float) -> None:
        self._rule = rule
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None, "the engine computes the loss"
        for group in self.param_groups:
            tensors = [tensor for tensor in group["params"] if tensor.grad is not None]
            if tensors:
                slots, grads = [self._slot(tensor) for tensor in tensors], [tensor.grad for tensor in tensors]
                self._rule.update(slots, grads, group["lr"], group["weight_decay"])

    def _slot(self, tensor: Tensor) -> Slot:
        state = self.state[tensor]
        if not state:
            new = self._rule.slot("", tensor)
            state.update(new.state, step=new.step)
        return Slot("", tensor, {kind: value for kind, value in state.items() if kind != "step"}, state["step"])
