"""AdamW over flat buffers, and the sum of squares for the gradient's norm.

No operations of a model: `megatron/optimizer` calls them with its own buffers, and has torch's functions for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.ops.operation import (
    Implementation,
    Native,
    Operation,
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


def joined(high: Tensor, low: Tensor) -> Tensor:
    """The fp32 numbers of which `high` (bf16) has the upper bits and `low` (int16) what is missing."""
    return ((high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)


def split(weights: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest bf16 numbers (of two as near, the larger in magnitude) and what is missing to fp32."""
    bits = weights.contiguous().view(torch.int32)
    low = bits.to(torch.int16)  # the lower half, as a signed number
    return ((bits - low.to(torch.int32)) >> 16).to(torch.int16).view(torch.bfloat16), low


def _native_adamw(ops: Any, weights: Tensor, beside: Tensor, *args: Any) -> None:
    """(weights, copy or remainder, exp_avg, exp_avg_sq, grad, ends, rates, control, beta1, beta2, eps)"""
    (ops.adamw_remainder_ if weights.dtype == torch.bfloat16 else ops.adamw_)(weights, beside, *args)


def _native_grad_norm(ops: Any, flat: Tensor) -> Tensor:
    return ops.square_sum(flat)


_DOUBLE_PRECISION = "; adds up in double precision, for which it may take 6 % longer than PyTorch's sum in fp32"


def _portable(target: Target) -> Implementation:
    return Implementation("torch", None, "PyTorch's own functions, a tensor at a time")


def _operation(name: str, function: Callable[..., Any], note: str = "") -> Operation:
    native = Native("optim", function, unsupported_floats, left_to_compiler=False, note=lambda target: note)
    return Operation(name, None, _portable, native)


OPERATIONS = (_operation("adamw", _native_adamw), _operation("grad_norm", _native_grad_norm, _DOUBLE_PRECISION))
