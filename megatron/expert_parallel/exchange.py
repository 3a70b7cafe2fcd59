"""All-to-all and permutation of rows, with their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron.distributed import collectives
from megatron.distributed.state import Axis


def exchanged(rows: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Tensor:
    """rows [sum(send), width]: the first send[0] go to member 0, the next send[1] to member 1, ... The result holds
    receive[i] rows from each member i, in the members' order."""
    return rows if axis.size == 1 else _Exchanged.apply(rows, list(send), list(receive), axis)


def permuted(rows: Tensor, order: Tensor) -> Tensor:
    """rows[order], where every row occurs once."""
    return _Permuted.apply(rows, order)


class _Exchanged(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], axis: Axis) -> Tensor:
        ctx.send, ctx.receive, ctx.axis = send, receive, axis
        return collectives.exchange(rows, send, receive, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return collectives.exchange(grad, ctx.receive, ctx.send, ctx.axis), None, None, None


class _Permuted(Function):
    """Backward is a plain permutation: torch's own would scatter-add, in an order that is not deterministic."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows[order]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        result: Tensor = grad.new_empty(grad.shape)
        result[order] = grad
        return result, None
