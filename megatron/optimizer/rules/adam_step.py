"""Adam's arithmetic for rules that store its moments in a form of their own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


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
