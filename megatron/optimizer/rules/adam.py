"""Adam and AdamW tensor by tensor: by torch's functions, by NVIDIA's apex, and with moments stored in bf16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from megatron.ops.apex import multi_tensor_adam
from megatron.optimizer.rules.base import Gated, LiveState, Slot


@dataclass(frozen=True)
class Adam(LiveState):
    """Updates with torch's own functions, in one fused pass over memory where the device has it."""

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


def adam_step(
    weight: Tensor,
    grad: Tensor,
    moments: Sequence[Tensor],
    *,
    step: Tensor,
    betas: tuple[float, float],
    eps: float,
    lr: float,
    weight_decay: float,
    decoupled: bool,
    open: float | Tensor,
) -> None:
    """Changes the weight and its two moments. `step` counts this update; `open`: see `Gated`."""
    exp_avg, exp_avg_sq = moments
    if decoupled:
        weight.mul_(1.0 - lr * weight_decay * open)
    else:
        grad = grad + weight_decay * weight
    exp_avg.add_((grad - exp_avg).mul_((1.0 - betas[0]) * open))
    exp_avg_sq.add_((grad * grad - exp_avg_sq).mul_((1.0 - betas[1]) * open))
    corrections = [1.0 - beta ** step.double().clamp(min=1.0) for beta in betas]  # in fp32, 0.999 ** 1 is 2e-5 off
    denominator = exp_avg_sq.sqrt().div_(corrections[1].sqrt().to(weight.dtype)).add_(eps)
    weight.sub_((exp_avg / denominator).mul_((lr * open / corrections[0]).to(weight.dtype)))


@dataclass(frozen=True)
class NarrowAdam(LiveState):
    """Stores moments in bf16 (--use-precision-aware-optimizer) and computes with them in the weight's own type."""

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


_CHUNK = 2048 * 32
"""Elements of a block of its kernels, as apex has it."""


@dataclass(frozen=True)
class ApexAdam(LiveState):
    """Updates with NVIDIA's apex: one launch for all tensors of a group."""

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
