"""Linear layers split over the tensor-parallel ranks: by output features (column) or by input features (row).

    hidden = ColumnParallelLinear(width, 4 * width, axis=state.tp)(x)      # each rank: its features
    y = RowParallelLinear(4 * width, width, axis=state.tp)(hidden)         # each rank: all of them

With `sequence_parallel`, x and y are this rank's piece [batch, seq / ranks, width] of the sequence.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron.distributed import collectives
from megatron.distributed.state import Axis
from megatron.model.linear import Put, flat, sends_products
from megatron.ops.linear import linear
from megatron.ops.wgrad import Wgrads
from megatron.tensor_parallel import mappings
from megatron.tensor_parallel.mappings import SEQUENCE


class _ParallelLinear(nn.Module):
    """What both kinds have: a part of the weight, the axis that the parts are on, and a plain product where that is
    one rank."""

    def __init__(self, weight: nn.Parameter, *, axis: Axis, bias: bool, sequence_parallel: bool) -> None:
        super().__init__()
        self.axis, self.sequence_parallel = axis, sequence_parallel
        self.weight = weight
        self.bias = nn.Parameter(torch.empty(weight.shape[0])) if bias else None
        self.wgrads: Wgrads | None = None  # who takes the weight's gradient as a product

    def forward(self, x: Tensor) -> Tensor:
        if self.axis.size == 1 and self.wgrads is None:
            return F.linear(x, self.weight, self.bias)
        return self.product(x)

    def product(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class ColumnParallelLinear(_ParallelLinear):
    """Holds rows of the weight, so a part of the output features; the bias is split with them.

    `weight` may be given (this rank's part); otherwise it is made, and left for the initialisation.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axis: Axis,
        bias: bool = True,
        sequence_parallel: bool = False,
        weight: nn.Parameter | None = None,
    ) -> None:
        """`out_features` is that of the whole layer, unless `weight` is given."""
        if weight is None:
            weight = nn.Parameter(torch.empty(_share(out_features, axis, "output"), in_features))
        super().__init__(weight, axis=axis, bias=bias, sequence_parallel=sequence_parallel)

    def product(self, x: Tensor) -> Tensor:
        return _linear(x, self.weight, self.bias, self.axis, self.sequence_parallel, self.wgrads)

    def extra_repr(self) -> str:
        rows, columns = self.weight.shape
        return f"{columns}, {rows} of {self.axis.size} parts, bias={self.bias is not None}"


class RowParallelLinear(_ParallelLinear):
    """Holds columns of the weight: takes a part of the input features; the bias is whole, and added to the sum."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axis: Axis,
        bias: bool = True,
        sequence_parallel: bool = False,
        weight: nn.Parameter | None = None,
    ) -> None:
        """`in_features` is that of the whole layer, unless `weight` is given."""
        if weight is None:
            weight = nn.Parameter(torch.empty(out_features, _share(in_features, axis, "input")))
        super().__init__(weight, axis=axis, bias=bias, sequence_parallel=sequence_parallel)

    def product(self, x: Tensor) -> Tensor:
        if self.wgrads is None:
            parts = F.linear(x, self.weight)  # [batch, seq, out_features], to be summed
        else:
            parts = _linear(x, self.weight, None, Axis.single("tp"), False, self.wgrads)
        y = (mappings.scattered if self.sequence_parallel else mappings.summed)(parts, self.axis)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        rows, columns = self.weight.shape
        return f"{columns} of {self.axis.size} parts, {rows}, bias={self.bias is not None}"


def _share(features: int, axis: Axis, which: str) -> int:
    if features % axis.size:
        raise ValueError(f"{features} {which} features do not divide by the {axis.size} ranks of the {axis.name} axis")
    return features // axis.size


def _linear(
    x: Tensor,
    weight: nn.Parameter,
    bias: Tensor | None,
    axis: Axis,
    sequence_parallel: bool,
    wgrads: Wgrads | None,
) -> Tensor:
    if not sends_products(wgrads, x, weight):
        return _Linear.apply(x, weight, bias, axis, sequence_parallel, None)
    # Detached, so that backward does not announce a gradient that another brings.
    return _Linear.apply(x, weight.detach(), bias, axis, sequence_parallel, partial(wgrads.put, weight))


class _Linear(Function):
    """The gradient of the input is on its way to the other ranks while the gradient of the weight is computed, unless
    `put` takes the factors of that product."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        axis: Axis,
        sequence_parallel: bool,
        put: Put | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)  # of a split sequence only the piece is kept
        ctx.axis, ctx.sequence_parallel, ctx.has_bias = axis, sequence_parallel, bias is not None
        ctx.put = put
        whole = collectives.gather_along(x, axis, SEQUENCE) if sequence_parallel else x
        return linear(whole, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        axis: Axis = ctx.axis
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        needs_weight = needs_weight or ctx.put is not None
        whole, arriving = (lambda: x), None
        if ctx.sequence_parallel and needs_weight:
            whole, arriving = collectives.start_gather_along(x, axis, SEQUENCE)
        grad_x, leaving = None, None
        if needs_x:
            grad_x = grad @ weight  # [batch, seq, in]
            if ctx.sequence_parallel:
                grad_x, leaving = collectives.start_scatter_sum(grad_x, axis, SEQUENCE)
            else:
                leaving = collectives.start_all_reduce(grad_x, axis)
        if arriving is not None:
            arriving.wait()
        grad_weight = None
        if needs_weight:
            if ctx.put is None:
                grad_weight = flat(grad).t() @ flat(whole())
            else:
                ctx.put(flat(grad), flat(whole()))
        grad_bias = flat(grad).sum(0) if ctx.has_bias and needs_bias else None
        if leaving is not None:
            leaving.wait()
        return grad_x, grad_weight, grad_bias, None, None, None
