"""Collectives between split and replicated parts of the model, with their gradients.

| function          | forward                       | backward                      |
|-------------------|-------------------------------|-------------------------------|
| `copied`          | nothing                       | sum over the ranks            |
| `summed`          | sum over the ranks            | nothing                       |
| `gathered`        | pieces of the sequence joined | sum, each keeps its piece     |
| `scattered`       | sum, each keeps its piece     | pieces of the sequence joined |

Activations are [batch, seq, ...]: the sequence is dimension 1.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron.distributed import collectives
from megatron.distributed.state import Axis

SEQUENCE = 1


def copied(x: Tensor, axis: Axis) -> Tensor:
    """A replicated activation enters a split layer."""
    return x if axis.size == 1 else _Copied.apply(x, axis)


def summed(x: Tensor, axis: Axis) -> Tensor:
    """The ranks' partial results become the replicated result."""
    return x if axis.size == 1 else _Summed.apply(x, axis)


def gathered(x: Tensor, axis: Axis) -> Tensor:
    """[batch, seq / ranks, ...] of a sequence-parallel part enters a split layer as [batch, seq, ...]."""
    return x if axis.size == 1 else _Gathered.apply(x, axis)


def scattered(x: Tensor, axis: Axis) -> Tensor:
    """Partial results [batch, seq, ...] leave a split layer as their sum's piece [batch, seq / ranks, ...]."""
    return x if axis.size == 1 else _Scattered.apply(x, axis)


class _Copied(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return collectives.all_reduce(grad.contiguous().clone(), ctx.axis), None


class _Summed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return collectives.all_reduce(x.contiguous().clone(), axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gathered(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return collectives.gather_along(x, axis, SEQUENCE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return collectives.scatter_sum(grad, ctx.axis, SEQUENCE), None


class _Scattered(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return collectives.scatter_sum(x, axis, SEQUENCE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return collectives.gather_along(grad, ctx.axis, SEQUENCE), None
