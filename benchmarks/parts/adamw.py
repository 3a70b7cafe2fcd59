"""AdamW cases of benchmarks/kernels.py: flat buffers, a rank's chunk of them, and shards of ZeRO 2 and 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

NUMBERS = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "lr": 1e-4, "weight_decay": 0.1}


def adamw_inputs(dtype: torch.dtype, device: str, ranks: int = 1) -> tuple[Any, ...]:
    """Draws 50 million weights, their bf16 copy, moments, and gradients of `dtype`. With several ranks, it returns the
    last rank's chunk under ZeRO."""
    count = 50_000_000
    own = slice(count // ranks * (ranks - 1), None)
    weights = torch.randn(count, device=device) * 0.02
    masters = weights[own].clone()
    moments = torch.zeros(2, masters.numel(), device=device).unbind()
    return masters, weights.to(torch.bfloat16)[own], *moments, torch.randn(count, device=device).to(dtype)[own]


def our_adamw(ops: Any) -> Callable[..., Any]:
    made: dict[str, Tensor] = {}

    def step(weights: Tensor, copy: Tensor, m: Tensor, v: Tensor, grad: Tensor) -> None:
        if not made:
            made["ends"] = (torch.arange(1, 101) * (grad.numel() // 100)).to(grad.device)
            made["rates"] = torch.ones(100, 2, device=grad.device)
            made["control"] = torch.tensor([1.0, 0.5, NUMBERS["lr"], NUMBERS["weight_decay"], 0.1, 0.03]).to(
                grad.device
            )
        numbers = NUMBERS["beta1"], NUMBERS["beta2"], NUMBERS["eps"]
        ops.adamw_(weights, copy, m, v, grad, made["ends"], made["rates"], made["control"], *numbers)

    return step


def torchs_adamw(weights: Tensor, copy: Tensor, m: Tensor, v: Tensor, grad: Tensor) -> None:
    """Unscales, runs PyTorch's fused step, and writes the copy."""
    wide = grad.float().mul_(1.0)
    step = torch.ones((), device=grad.device)
    adamw([weights], [wide], [m], [v], [], [step], fused=True, foreach=False, amsgrad=False, maximize=False, **NUMBERS)
    copy.copy_(weights)


def adamw_formula(weights: Tensor, copy: Tensor, m: Tensor, v: Tensor, grad: Tensor) -> None:
    adamw_formula_of_shards(weights, m, v, grad)
    copy.copy_(weights)


RANKS, LAYERS, HIDDEN = 8, 24, 1024
SHARDS = [
    rows * HIDDEN // RANKS
    for _ in range(LAYERS)
    for rows in (3 * HIDDEN, 3, HIDDEN, 1, 4 * HIDDEN, 4, 4 * HIDDEN, 1, 1, 1, 1, 1)  # weights and biases; two norms
]
"""Sizes of one rank's shards of a GPT's layers under ZeRO 2 or 3, a separate fp32 tensor per parameter."""


def shards_inputs(dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """Draws weights, two moments (zeros) and gradients of `dtype`, each a flat vector of all shards."""
    count = sum(SHARDS)
    moments = torch.zeros(2, count, device=device).unbind()
    return torch.randn(count, device=device) * 0.02, *moments, torch.randn(count, device=device).to(dtype)


def our_adamw_of_shards(ops: Any) -> Callable[..., Any]:
    made: dict[int, Tensor] = {}

    def step(*tensors: Tensor) -> None:
        device = tensors[0].device
        if not made:
            made.update({size: torch.tensor([size]).to(device) for size in SHARDS})
            made[0] = torch.tensor([1.0, 0.5, NUMBERS["lr"], NUMBERS["weight_decay"], 0.1, 0.03]).to(device)
            made[-1], made[-2] = torch.ones(1, 2, device=device), torch.empty(0, dtype=torch.bfloat16, device=device)
        numbers = NUMBERS["beta1"], NUMBERS["beta2"], NUMBERS["eps"]
        for weight, m, v, grad in zip(*(flat.split(SHARDS) for flat in tensors), strict=True):
            ops.adamw_(weight, made[-2], m, v, grad, made[grad.numel()], made[-1], made[0], *numbers)

    return step


def torchs_adamw_of_shards(weights: Tensor, m: Tensor, v: Tensor, grad: Tensor) -> None:
    """Unscales and clips, in a pass each like GradScaler.unscale_ and clip_grad_norm_, then runs the fused step."""
    shards = [list(flat.split(SHARDS)) for flat in (weights, grad.mul_(1.0).mul_(1.0).float(), m, v)]
    steps = list(torch.ones(len(SHARDS), device=grad.device).unbind())
    adamw(*shards, [], steps, fused=True, foreach=False, amsgrad=False, maximize=False, **NUMBERS)


def adamw_formula_of_shards(weights: Tensor, m: Tensor, v: Tensor, grad: Tensor) -> None:
    g = grad.float() * 0.5
    m.lerp_(g, 0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    weights.mul_(1 - 1e-5).addcdiv_(m, v.sqrt().div_(0.03).add_(1e-8), value=-1e-3)
