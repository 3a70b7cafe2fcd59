"""Adam with torch's own functions, in one fused pass over memory where the device has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from megatron.optimizer.rules.base import LiveState, Slot


@dataclass(frozen=True)
class Adam(LiveState):
    beta1: float
    beta2: float
    eps: float
    fused: bool
    decoupled: bool = True
    """AdamW: weight decay shrinks the weight. Else it is added to the gradient, and so to the moments (L2)."""

    def slot(self, name: str, tensor: Tensor) -> Slot:
        state = {kind: torch.zeros_like(tensor, requires_grad=False) for kind in ("exp_avg", "exp_avg_sq")}
        return Slot(name, tensor, state, torch.zeros((), device=tensor.device if self.fused else "cpu"))

    def update(
        self, slots: Sequence[Slot], grads: list[Tensor], lr: float, weight_decay: float, skip: Tensor | None = None
    ) -> None:
        function = adamw if self.decoupled else adam
        function(
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
