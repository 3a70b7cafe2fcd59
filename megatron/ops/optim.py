"""AdamW over flat buffers, and the sum of squares for the gradient's norm.

These operations are not part of models: `megatron/optimizer` calls them on its buffers, with torch's functions as a
fallback.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.ops.apex import has_apex
from megatron.ops.operation import (
    DTYPES,
    Implementation,
    Native,
    Operation,
    Portable,
    Target,
    register_shapes,
    unsupported_floats,
    without_derivative,
)


def register(namespace: str) -> None:
    register_shapes(
        namespace,
        adamw_=lambda *args: None,
        adamw_remainder_=lambda *args: None,
        square_sum=lambda x: x.new_empty((), dtype=torch.float64),
    )
    without_derivative(namespace, "square_sum")


def join_fp32(high: Tensor, low: Tensor) -> Tensor:
    """Joins bf16 numbers `high` and their int16 remainders `low` to fp32."""
    return ((high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)


def split_fp32(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Splits fp32 numbers into the nearest bf16 (ties away from zero) and int16 remainders."""
    bits = weights.contiguous().view(torch.int32)
    low = bits.to(torch.int16)  # the lower half, as a signed number
    return ((bits - low.to(torch.int32)) >> 16).to(torch.int16).view(torch.bfloat16), low


def adamw_in_place(
    weights: Tensor,
    copy: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    ends: Tensor,
    rates: Tensor,
    control: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """AdamW step on flat tensors [elements] in torch's operations, for any dtype. The kernel computes the same.

    The flat tensors consist of pieces. Input `ends` [pieces] has the end of each piece. Input `rates` [pieces, 2] has
    the factors of each piece on learning rate and weight decay. Input `control` [6] has these numbers: 0 to skip the
    step, factor on gradients, learning rate, weight decay, bias correction of the first moment, square root of that of
    the second. The new weights are copied to `copy` in its dtype, unless it is empty.
    """
    applied, factor, lr, decay, correction1, correction2_root = control.unbind()
    lengths = ends.diff(prepend=ends.new_zeros(1))
    per_element = rates.to(control.dtype).repeat_interleave(lengths, dim=0, output_size=weights.numel())
    lr_mult, wd_mult = per_element.unbind(1)
    true_grad, rate = grad.to(weights.dtype) * factor, lr * lr_mult
    m = exp_avg + (1.0 - beta1) * (true_grad - exp_avg)
    v = beta2 * exp_avg_sq + (1.0 - beta2) * true_grad.square()
    step = (rate / correction1) * (m / (v.sqrt() / correction2_root + eps))
    new = weights - (rate * (decay * wd_mult) * weights + step)
    for kept, value in ((exp_avg, m), (exp_avg_sq, v), (weights, new)):
        kept.copy_(torch.where(applied == 0, kept, value))
    if copy.numel():
        copy.copy_(weights)


def _native_adamw(ops: Any, weights: Tensor, beside: Tensor, *args: Any) -> None:
    """Arguments: weights, copy or remainder, exp_avg, exp_avg_sq, grad, ends, rates, control, beta1, beta2, eps."""
    (ops.adamw_remainder_ if weights.dtype == torch.bfloat16 else ops.adamw_)(weights, beside, *args)


def _native_grad_norm(ops: Any, flat: Tensor) -> Tensor:
    return ops.square_sum(flat)


_DOUBLE_PRECISION = "; sums in double precision, which may take 6 % longer than PyTorch's fp32 sum"


def _portable(target: Target) -> Implementation:
    return Implementation("torch", None, "PyTorch's own functions, one tensor at a time")


def _or_apex(target: Target) -> Implementation:
    if has_apex(target):
        return Implementation("apex", None, "NVIDIA's apex is installed")
    return _portable(target)


def _operation(
    name: str,
    portable: Portable,
    function: Callable[..., Any],
    note: str = "",
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> Operation:
    native = Native(
        "optim", function, unsupported_floats, dtypes=dtypes, left_to_compiler=False, note=lambda target: note
    )
    return Operation(name, None, portable, native)


OPERATIONS = (
    _operation("adamw", _or_apex, _native_adamw, dtypes=(torch.float32, torch.bfloat16)),  # dtypes of gradients
    _operation("grad_norm", _portable, _native_grad_norm, _DOUBLE_PRECISION),
)
