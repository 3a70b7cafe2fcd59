"""SGD with momentum; weight decay is added to the gradient, as in Megatron."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from megatron.optimizer.rules.base import Control, LiveState, Slot, Slots


@dataclass(frozen=True)
class Sgd(LiveState):
    momentum: float
    fused: bool

    def slot(self, name: str, tensor: Tensor) -> Slot:
        state = {"momentum_buffer": torch.zeros_like(tensor, requires_grad=False)} if self.momentum else {}
        return Slot(name, tensor, state, torch.zeros(()))

    def step(self, store: Slots, shards: Sequence[str], control: Control) -> None:
        slots, grads = store.of(shards)
        sgd(
            [slot.tensor for slot in slots],
            grads,
            [slot.state.get("momentum_buffer") for slot in slots],
            fused=self.fused,
            foreach=not self.fused,
            found_inf=control.skip,
            weight_decay=control.weight_decay,
            momentum=self.momentum,
            lr=control.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
