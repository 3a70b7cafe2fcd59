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

from megatron.ops.operation import Implementation, Operation, Target

Put = Callable[[nn.Parameter, Tensor, Tensor], None]
"""Takes the factors dy and x of a weight's gradient dy.T @ x (`Wgrads.put`)."""


class Loop:
    """One product per group."""

    @staticmethod
    def forward(x: Tensor, counts: Sequence[int], weights: Sequence[Tensor]) -> Tensor:
        y = x.new_empty(x.shape[0], weights[0].shape[0])
        for rows, result, weight in zip(x.split(counts), y.split(counts), weights, strict=True):
            torch.mm(rows, weight.t(), out=result)
        return y

    @staticmethod
    def input_gradient(dy: Tensor, counts: Sequence[int], weights: Sequence[Tensor]) -> Tensor:
        return Loop.forward(dy, counts, [weight.t() for weight in weights])

    @staticmethod
    def weight_gradients(dy: Tensor, x: Tensor, counts: Sequence[int]) -> Sequence[Tensor]:
        return [part.t() @ rows for part, rows in zip(dy.split(counts), x.split(counts), strict=True)]


class Grouped:
    """All groups in one product."""

    @staticmethod
    def forward(x: Tensor, counts: Sequence[int], weights: Sequence[Tensor]) -> Tensor:
        return F.grouped_mm(x, _stacked(weights).transpose(1, 2), offs=_ends(counts, x))

    @staticmethod
    def input_gradient(dy: Tensor, counts: Sequence[int], weights: Sequence[Tensor]) -> Tensor:
        return F.grouped_mm(dy, _stacked(weights), offs=_ends(counts, dy))

    @staticmethod
    def weight_gradients(dy: Tensor, x: Tensor, counts: Sequence[int]) -> Sequence[Tensor]:
        gradients = F.grouped_mm(dy.t(), x, offs=_ends(counts, x))  # [groups, out, in]
        for group, count in enumerate(counts):
            if not count:  # a kernel may leave the result of a product over no rows unwritten
                gradients[group].zero_()
        return gradients.unbind()


def by_loop(x: Tensor, counts: Sequence[int], weights: Sequence[nn.Parameter], put: Put | None = None) -> Tensor:
    return _grouped_linear(Loop, x, counts, weights, put)


def by_grouped_mm(x: Tensor, counts: Sequence[int], weights: Sequence[nn.Parameter], put: Put | None = None) -> Tensor:
    return _grouped_linear(Grouped if _fits(x, weights) else Loop, x, counts, weights, put)


def _fits(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """True if `F.grouped_mm` accepts these: bf16 rows on CUDA, of a multiple of 16 bytes each. Torch rejects products
    over zero rows (pytorch #192497), which a rank gets if no token chose its experts."""
    rows = x.shape[0] > 0 and x.is_cuda and x.dtype == torch.bfloat16
    return rows and all(size % 8 == 0 for size in weights[0].shape)


def _grouped_linear(
    how: type[Loop] | type[Grouped], x: Tensor, counts: Sequence[int], weights: Sequence[nn.Parameter], put: Put | None
) -> Tensor:
    if put is None:
        return _GroupedLinear.apply(how, None, list(counts), x, *weights)
    assert x.requires_grad or not torch.is_grad_enabled(), (
        "the input needs no gradient, so backward would skip the layer"
    )
    # Detached, so that autograd does not report gradients that the queue computes later.
    puts = [partial(put, weight) for weight in weights]
    return _GroupedLinear.apply(how, puts, list(counts), x, *(weight.detach() for weight in weights))


class _GroupedLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        how: type[Loop] | type[Grouped],
        puts: Sequence[Callable[[Tensor, Tensor], None]] | None,
        counts: list[int],
        x: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        ctx.how, ctx.puts, ctx.counts = how, puts, counts
        ctx.save_for_backward(x, *weights)
        return how.forward(x, counts, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        dy, counts = dy.contiguous(), ctx.counts
        dx = ctx.how.input_gradient(dy, counts, weights) if ctx.needs_input_grad[3] else None
        gradients: Sequence[Tensor | None] = [None] * len(weights)
        if ctx.puts is not None:
            for put, part, rows in zip(ctx.puts, dy.split(counts), x.split(counts), strict=True):
                put(part, rows)
        elif any(ctx.needs_input_grad[4:]):
            gradients = ctx.how.weight_gradients(dy, x, counts)
        return None, None, None, dx, *gradients


def _ends(counts: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(counts, device=like.device).cumsum(0, dtype=torch.int32)


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
