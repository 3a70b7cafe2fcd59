"""Adam with NVIDIA's apex: one launch for all tensors of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.ops.apex import multi_tensor_adam
from megatron.optimizer.rules.base import LiveState, Slot

_CHUNK = 2048 * 32
"""Elements of a block of its kernels, as apex has it."""


@dataclass(frozen=True)
class ApexAdam(LiveState):
    beta1: float
    beta2: float
    eps: float
    decoupled: bool = True
    fused: bool = True

    def slot(self, name: str, tensor: Tensor) -> Slot:
        state = {kind: torch.zeros_like(tensor, requires_grad=False) for kind in ("exp_avg", "exp_avg_sq")}
        return Slot(name, tensor, state, torch.zeros((), device=tensor.device))

    def update(
        self, slots: Sequence[Slot], grads: list[Tensor], lr: float, weight_decay: float, skip: Tensor | None = None
    ) -> None:
        if not slots:
            return
        device = slots[0].tensor.device
        left_out = torch.zeros(1, dtype=torch.int32, device=device) if skip is None else skip.view(1).to(torch.int32)
        torch._foreach_add_([slot.step for slot in slots], [(1 - left_out[0]).float()] * len(slots))
        tensors = [
            (grad, slot.tensor, slot.state["exp_avg"], slot.state["exp_avg_sq"])
            for slot, grad in zip(slots, grads, strict=True)
            if grad.numel()  # apex starts a kernel at a tensor's last chunk, and an empty one has none
        ]
        if not tensors:
            return
        multi_tensor_adam(
            _CHUNK,
            left_out,
            [list(kind) for kind in zip(*tensors, strict=True)],
            torch.full((1,), lr, device=device),
            self.beta1,
            self.beta2,
            self.eps,
            slots[0].step.view(1).to(torch.int32),
            1 if self.decoupled else 0,
            1,  # the moments are corrected for their start at zero
            weight_decay,
            torch.ones(1, device=device),  # the gradients are the true ones
        )
