"""AdamW whose moments are stored in bf16 (--use-precision-aware-optimizer) and computed in the weight's own type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.optimizer.rules.adam_step import adam_step
from megatron.optimizer.rules.base import Gated, LiveState, Slot


@dataclass(frozen=True)
class NarrowAdam(LiveState):
    beta1: float
    beta2: float
    eps: float
    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype
    decoupled: bool = True
    fused: bool = True

    def slot(self, name: str, tensor: Tensor) -> Slot:
        types = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        state = {
            kind: torch.zeros_like(tensor, requires_grad=False, dtype=dtype if dtype.itemsize < 4 else tensor.dtype)
            for kind, dtype in types.items()
        }
        return Slot(name, tensor, state, torch.zeros((), dtype=torch.float32, device=tensor.device))

    def update(
        self, slots: Sequence[Slot], grads: list[Tensor], lr: float, weight_decay: float, skip: Tensor | None = None
    ) -> None:
        gated = Gated.by(skip, grads)
        for slot, grad in zip(slots, gated.grads, strict=True):
            moments = [slot.state[kind].to(slot.tensor.dtype, copy=True) for kind in ("exp_avg", "exp_avg_sq")]
            slot.step += gated.open
            adam_step(
                slot.tensor,
                grad,
                moments,
                step=slot.step,
                betas=(self.beta1, self.beta2),
                eps=self.eps,
                lr=lr,
                weight_decay=weight_decay,
                decoupled=self.decoupled,
                open=gated.open,
            )
            for kind, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
                slot.state[kind].copy_(moment)
