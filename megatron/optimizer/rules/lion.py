"""Lion: every element moves by the learning rate; the sign of a mix of momentum and gradient gives the direction (Chen
et al., 2023)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.optimizer.rules.base import Control, Gated, LiveState, Slot, Slots


@dataclass(frozen=True)
class Lion(LiveState):
    beta1: float
    """Weight of the momentum in the direction; the rest is this step's gradient."""
    beta2: float
    """Decay of the momentum."""
    fused: bool = True

    def slot(self, name: str, tensor: Tensor) -> Slot:
        return Slot(name, tensor, {"exp_avg": torch.zeros_like(tensor, requires_grad=False)}, torch.zeros(()))

    def step(self, store: Slots, shards: Sequence[str], control: Control) -> None:
        (slots, grads), (lr, weight_decay, skip) = store.of(shards), control
        gated = Gated.by(skip, grads)
        for slot, grad in zip(slots, gated.grads, strict=True):
            momentum = slot.state["exp_avg"]
            direction = momentum.lerp(grad, 1.0 - self.beta1).sign_()
            slot.tensor.mul_(1.0 - lr * weight_decay * gated.open)
            slot.tensor.sub_(direction.mul_(lr * gated.open))
            momentum.add_((grad - momentum).mul_((1.0 - self.beta2) * gated.open))
