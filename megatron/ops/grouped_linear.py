"""Linear layers over contiguous groups of rows with one weight per group, for the experts of a rank.

    y[rows of group g] = x[rows of group g] @ weights[g].T          x [rows, in], weights[g] [out, in], y [rows, out]
    dx[rows of g]      = dy[rows of g] @ weights[g]
    dweights[g]        = dy[rows of g].T @ x[rows of g]             zero for a group without rows

The fallback, which is also the reference in tests, computes one product per group, written directly into the result. On
CUDA, one kernel (`F.grouped_mm`) computes all bf16 products, which is faster for many small groups. On a CPU, that
function is itself a loop, and copies all weights.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron.ops.expert_rows import RowGroups
from megatron.ops.operation import Implementation, Operation, Target

Put = Callable[[nn.Parameter, Tensor, Tensor], None]
"""Takes the factors dy and x of a weight's gradient dy.T @ x (`Wgrads.put`)."""


class Loop:
    """One product per group."""

    @staticmethod
    def forward(x: Tensor, groups: RowGroups, weights: Sequence[Tensor]) -> Tensor:
        y = x.new_empty(x.shape[0], weights[0].shape[0])
        counts = groups.on_host
        for rows, result, weight in zip(x.split(counts), y.split(counts), weights, strict=True):
            torch.mm(rows, weight.t(), out=result)
        return y

    @staticmethod
    def input_gradient(dy: Tensor, groups: RowGroups, weights: Sequence[Tensor]) -> Tensor:
        return Loop.forward(dy, groups, [weight.t() for weight in weights])

    @staticmethod
    def weight_gradients(dy: Tensor, x: Tensor, groups: RowGroups) -> Sequence[Tensor]:
        counts = groups.on_host
        return [part.t() @ rows for part, rows in zip(dy.split(counts), x.split(counts), strict=True)]


class Grouped:
    """All groups in one product. Every group must have a row: a kernel may leave the result of a product over no rows
    unwritten."""

    @staticmethod
    def forward(x: Tensor, groups: RowGroups, weights: Sequence[Tensor]) -> Tensor:
        return F.grouped_mm(x, _stacked(weights).transpose(1, 2), offs=groups.ends)

    @staticmethod
    def input_gradient(dy: Tensor, groups: RowGroups, weights: Sequence[Tensor]) -> Tensor:
        return F.grouped_mm(dy, _stacked(weights), offs=groups.ends)

    @staticmethod
    def weight_gradients(dy: Tensor, x: Tensor, groups: RowGroups) -> Sequence[Tensor]:
        return F.grouped_mm(dy.t(), x, offs=groups.ends).unbind()  # [groups, out, in]


def by_loop(x: Tensor, groups: RowGroups, weights: Sequence[nn.Parameter], put: Put | None = None) -> Tensor:
    return _grouped_linear(Loop, x, groups, weights, put)


def by_grouped_mm(x: Tensor, groups: RowGroups, weights: Sequence[nn.Parameter], put: Put | None = None) -> Tensor:
    return _grouped_linear(Grouped if _fits(x, weights) else Loop, x, groups, weights, put)


def least_rows(operation: Callable[..., Tensor]) -> int:
    """Rows that each group must have."""
    return 1 if operation is by_grouped_mm else 0


def _fits(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """True if `F.grouped_mm` accepts these: bf16 rows on CUDA, of a multiple of 16 bytes each. Torch rejects products
    over zero rows (pytorch #192497), which a rank gets if no token chose its experts."""
    rows = x.shape[0] > 0 and x.is_cuda and x.dtype == torch.bfloat16
    return rows and all(size % 8 == 0 for size in weights[0].shape)


def _grouped_linear(
    how: type[Loop] | type[Grouped], x: Tensor, groups: RowGroups, weights: Sequence[nn.Parameter], put: Put | None
) -> Tensor:
    if put is None:
        return _GroupedLinear.apply(how, None, groups, x, *weights)
    assert x.requires_grad or not torch.is_grad_enabled(), (
        "the input needs no gradient, so backward would skip the layer"
    )
    # Detached, so that autograd does not report gradients that the queue computes later.
    puts = [partial(put, weight) for weight in weights]
    return _GroupedLinear.apply(how, puts, groups, x, *(weight.detach() for weight in weights))


class _GroupedLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        how: type[Loop] | type[Grouped],
        puts: Sequence[Callable[[Tensor, Tensor], None]] | None,
        groups: RowGroups,
        x: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        ctx.how, ctx.puts, ctx.groups = how, puts, groups
        ctx.save_for_backward(x, *weights)
        return how.forward(x, groups, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        dy, groups = dy.contiguous(), ctx.groups
        dx = ctx.how.input_gradient(dy, groups, weights) if ctx.needs_input_grad[3] else None
        gradients: Sequence[Tensor | None] = [None] * len(weights)
        if ctx.puts is not None:
            counts = groups.on_host
            for put, part, rows in zip(ctx.puts, dy.split(counts), x.split(counts), strict=True):
                put(part, rows)
        elif any(ctx.needs_input_grad[4:]):
            gradients = ctx.how.weight_gradients(dy, x, groups)
        return None, None, None, dx, *gradients


def _stacked(weights: Sequence[Tensor]) -> Tensor:
    """Stacks the weights to [groups, out, in]: a view if they are adjacent in memory, else a copy."""
    first, size = weights[0], weights[0].numel()
    base = first.untyped_storage().data_ptr()
    if all(
        weight.untyped_storage().data_ptr() == base
        and weight.storage_offset() == first.storage_offset() + group * size
        and weight.is_contiguous()
        for group, weight in enumerate(weights)
    ):
        return first.as_strided((len(weights), *first.shape), (size, *first.stride()))
    return torch.stack(list(weights))


def _portable(target: Target) -> Implementation:
    if target.kind.cuda_libraries:
        reason = "one product for all experts in bf16; one per expert in other dtypes"
        return Implementation("torch", by_grouped_mm, reason)
    reason = "one product per expert: PyTorch's grouped product is a loop on this device, and copies weights"
    return Implementation("ref", by_loop, reason)


OPERATIONS = (Operation("grouped_linear", by_loop, _portable),)
