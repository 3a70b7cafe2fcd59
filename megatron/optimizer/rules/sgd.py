"""SGD with momentum; weight decay is added to the gradient, as in Megatron."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from megatron.optimizer.rules.base import LiveState, Slot


@dataclass(frozen=True)
class Sgd(LiveState):
    momentum: float
    fused: bool

    def slot(self, name: str, tensor: Tensor) -> Slot:
        state = {"momentum_buffer": torch.zeros_like(tensor, requires_grad=False)} if self.momentum else {}
        return Slot(name, tensor, state, torch.zeros(()))

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
