"""A linear layer with uninitialised weights, for `model.init` (nn.Linear would draw values that are overwritten)."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron.model.wgrads import Put, WgradRoute, flat
from megatron.ops.linear import linear
from megatron.ops.packed import PackedWeight


class Linear(nn.Module):
    def __init__(self, in_features: int, out_features: int, *, bias: bool, wgrads: WgradRoute | None = None) -> None:
        """`wgrads`: receives the two factors of the weight's gradient, if it accepts them; otherwise autograd computes
        the gradient."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.wgrads = wgrads
        self.packed: PackedWeight | None = None
        """Repacked copy of the current weight for passes without gradients (`megatron/inference/packed.py`)."""

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is not None and not torch.is_grad_enabled():
            return self.packed(x, self.bias)
        if self.wgrads is not None and self.wgrads.takes(x, self.weight):
            return _LinearHandingOver.apply(x, self.weight.detach(), self.bias, partial(self.wgrads.put, self.weight))
        return F.linear(x, self.weight, self.bias)  # [..., in_features] -> [..., out_features]

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}, bias={self.bias is not None}"


class _LinearHandingOver(Function):
    """A linear layer that hands the two factors of its weight gradient to `put`. The weight is passed detached, so that
    autograd does not compute that gradient too."""

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
