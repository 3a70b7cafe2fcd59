"""Adam and AdamW tensor by tensor: one rule, a storage for its moments, and an engine that computes.

| storage | moments between updates | engines |
|---|---|---|
| `AsWeights` | in the weight's dtype | torch's functions, NVIDIA's apex |
| `Narrow` | in bf16 | `by_formula` |
| `EightBits` (`eight_bit_moments.py`) | in 8 bits | `by_formula` |
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from megatron.ops.apex import multi_tensor_adam
from megatron.optimizer.rules.base import Control, Gated, LiveState, Slot, Slots

MOMENTS = ("exp_avg", "exp_avg_sq")


class AsWeights(LiveState):
    def made(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """State of a parameter before the first update."""
        del name
        return {kind: torch.zeros_like(tensor, requires_grad=False) for kind in MOMENTS}

    def read(self, slot: Slot) -> dict[str, Tensor]:
        """Moments in the weight's dtype and shape, to be changed and then passed to `write`. Here they are the live
        tensors, and `write` does nothing."""
        return slot.state

    def write(self, slot: Slot, moments: Mapping[str, Tensor]) -> None: ...


@dataclass(frozen=True)
class Narrow(AsWeights):
    """Keeps moments in narrower dtypes, for --use-precision-aware-optimizer."""

    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype

    def made(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        types = {kind: getattr(self, kind) for kind in MOMENTS}
        return {
            kind: torch.zeros_like(tensor, requires_grad=False, dtype=dtype if dtype.itemsize < 4 else tensor.dtype)
            for kind, dtype in types.items()
        }

    def read(self, slot: Slot) -> dict[str, Tensor]:
        return {kind: slot.state[kind].to(slot.tensor.dtype, copy=True) for kind in MOMENTS}

    def write(self, slot: Slot, moments: Mapping[str, Tensor]) -> None:
        for kind, moment in moments.items():
            slot.state[kind].copy_(moment)


Engine = Callable[["Adam", Sequence[Slot], list[Tensor], Control], None]


@dataclass(frozen=True, eq=False)
class Adam:
    beta1: float
    beta2: float
    eps: float
    storage: AsWeights
    engine: Engine
    decoupled: bool = True
    """True: AdamW, where weight decay shrinks the weight. False: decay is added to the gradient (L2)."""
    fused: bool = True

    @property
    def loads_in_place(self) -> bool:
        return self.storage.loads_in_place

    def slot(self, name: str, tensor: Tensor) -> Slot:
        step = torch.zeros((), dtype=torch.float32, device=tensor.device if self.fused else "cpu")
        return Slot(name, tensor, self.storage.made(name, tensor), step)

    def step(self, store: Slots, shards: Sequence[str], control: Control) -> None:
        self.engine(self, *store.of(shards), control)

    def saved(self, slot: Slot) -> dict[str, Tensor]:
        return self.storage.saved(slot)

    def restore(self, slot: Slot, saved: Mapping[str, Tensor]) -> None:
        self.storage.restore(slot, saved)


def by_torch(rule: Adam, slots: Sequence[Slot], grads: list[Tensor], control: Control) -> None:
    """Updates with torch's own functions, fused if the device supports it."""
    function = adamw if rule.decoupled else adam
    function(
        [slot.tensor for slot in slots],
        grads,
        [slot.state["exp_avg"] for slot in slots],
        [slot.state["exp_avg_sq"] for slot in slots],
        [],
        [slot.step for slot in slots],
        fused=rule.fused,
        foreach=not rule.fused,
        found_inf=control.skip,
        amsgrad=False,
        beta1=rule.beta1,
        beta2=rule.beta2,
        lr=control.lr,
        weight_decay=control.weight_decay,
        eps=rule.eps,
        maximize=False,
    )


_CHUNK = 2048 * 32
"""Elements per block of apex's kernels, a constant of apex."""


def by_apex(rule: Adam, slots: Sequence[Slot], grads: list[Tensor], control: Control) -> None:
    """Updates with NVIDIA's apex: one launch for all tensors of a group."""
    if not slots:
        return
    device, (lr, weight_decay, skip) = slots[0].tensor.device, control
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
        rule.beta1,
        rule.beta2,
        rule.eps,
        slots[0].step.view(1).to(torch.int32),
        1 if rule.decoupled else 0,
        1,  # bias correction of the moments
        weight_decay,
        torch.ones(1, device=device),  # gradients are already unscaled
    )


def by_formula(rule: Adam, slots: Sequence[Slot], grads: list[Tensor], control: Control) -> None:
    """Updates tensor by tensor: only one tensor's moments at a time are in the weight's dtype."""
    gated = Gated.by(control.skip, grads)
    for slot, grad in zip(slots, gated.grads, strict=True):
        moments = rule.storage.read(slot)
        slot.step += gated.open
        _update(rule, slot, grad, moments, control, gated.open)
        rule.storage.write(slot, moments)


def _update(
    rule: Adam, slot: Slot, grad: Tensor, moments: Mapping[str, Tensor], control: Control, open: float | Tensor
) -> None:
    """Changes the weight and its two moments. `slot.step` counts this update; `open`: see `Gated`."""
    (lr, weight_decay, _), weight = control, slot.tensor
    exp_avg, exp_avg_sq = moments["exp_avg"], moments["exp_avg_sq"]
    if rule.decoupled:
        weight.mul_(1.0 - lr * weight_decay * open)
    else:
        grad = grad + weight_decay * weight
    exp_avg.add_((grad - exp_avg).mul_((1.0 - rule.beta1) * open))
    exp_avg_sq.add_((grad * grad - exp_avg_sq).mul_((1.0 - rule.beta2) * open))
    step = slot.step.double().clamp(min=1.0)  # in fp32, 0.999 ** 1 is 2e-5 off
    corrections = [1.0 - beta**step for beta in (rule.beta1, rule.beta2)]
    denominator = exp_avg_sq.sqrt().div_(corrections[1].sqrt().to(weight.dtype)).add_(rule.eps)
    weight.sub_((exp_avg / denominator).mul_((lr * open / corrections[0]).to(weight.dtype)))
