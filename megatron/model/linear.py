"""A linear layer whose weights are left for the initialisation by name (nn.Linear would draw them twice)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron.ops.linear import linear
from megatron.ops.wgrad import Wgrads

Put = Callable[[Tensor, Tensor], None]


class Linear(nn.Module):
    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.wgrads: Wgrads | None = None  # who takes the weight's gradient as a product

    def forward(self, x: Tensor) -> Tensor:
        if sends_products(self.wgrads, x, self.weight):
            return _Linear.apply(x, self.weight.detach(), self.bias, partial(self.wgrads.put, self.weight))
        return F.linear(x, self.weight, self.bias)  # [..., in_features] -> [..., out_features]

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}, bias={self.bias is not None}"


def sends_products(wgrads: Wgrads | None, x: Tensor, weight: nn.Parameter) -> TypeGuard[Wgrads]:
    """Without a gradient of its input backward passes a layer by; a compiled layer leaves its gradients to backward."""
    if torch.compiler.is_compiling() or wgrads is None:
        return False
    watched = bool(weight._backward_hooks)  # somebody wants to see the gradient
    return x.requires_grad and weight.requires_grad and torch.is_grad_enabled() and not watched


class _Linear(Function):
    """The weight is given detached, so that backward does not announce a gradient that another brings; so is the
    parameter itself, hidden in `put`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, put: Put) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.put = put
        return linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = flat(grad)
        ctx.put(rows, flat(x))
        return grad @ weight, None, rows.sum(0) if ctx.needs_input_grad[2] else None, None


def flat(x: Tensor) -> Tensor:
    """[..., features] -> [tokens, features]."""
    return x.reshape(-1, x.shape[-1])
