"""Activations, gated ones, and GELU of a sum with a bias."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.ops.operation import (
    Function,
    Native,
    Operation,
    described,
    register_shapes,
    torch_function,
    unsupported_floats,
    without_derivative,
)
from megatron.utils.dtype import widened


def gelu(x: Tensor, tanh: bool) -> Tensor:
    wide = widened(x)
    if tanh:
        inner = math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide.pow(3))
        return (0.5 * wide * (1.0 + torch.tanh(inner))).to(x.dtype)
    return (0.5 * wide * (1.0 + torch.erf(wide / math.sqrt(2.0)))).to(x.dtype)


def bias_gelu(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    return gelu((x + bias).to(x.dtype), tanh)


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)  # [..., ffn] each
    return (widened(gate) * torch.sigmoid(widened(gate))).to(x.dtype) * up


def geglu(x: Tensor, tanh: bool) -> Tensor:
    gate, up = x.chunk(2, dim=-1)  # [..., ffn] each
    return gelu(gate, tanh) * up


def squared_relu(x: Tensor) -> Tensor:
    return torch.relu(x).square()


# ---------------------------------------------------------------- PyTorch's own functions


def torch_gelu(x: Tensor, tanh: bool) -> Tensor:
    return F.gelu(x, approximate="tanh" if tanh else "none")


def torch_bias_gelu(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    return torch_gelu((x + bias).to(x.dtype), tanh)


def torch_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)  # [..., ffn] each
    return F.silu(gate) * up


def torch_geglu(x: Tensor, tanh: bool) -> Tensor:
    gate, up = x.chunk(2, dim=-1)  # [..., ffn] each
    return torch_gelu(gate, tanh) * up


# ---------------------------------------------------------------- the kernels of csrc/
# Only the input is kept for the backward pass.


def register(namespace: str) -> None:
    ops = getattr(torch.ops, namespace)
    register_shapes(
        namespace,
        swiglu_forward=_half,
        geglu_forward=_half,
        gelu_forward=_same,
        squared_relu_forward=_same,
        swiglu_backward=lambda grad, x: torch.empty_like(x),
        geglu_backward=lambda grad, x, tanh: torch.empty_like(x),
        gelu_backward=_gelu_gradients,
        squared_relu_backward=lambda grad, x: torch.empty_like(x),
    )
    for name in ("swiglu", "geglu", "gelu", "squared_relu"):
        _register_gradient(namespace, name, getattr(ops, f"{name}_backward"))
        without_derivative(namespace, f"{name}_backward")


def _half(x: Tensor, *options: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _same(x: Tensor, *bias_and_options: Any) -> Tensor:
    return torch.empty_like(x)


def _gelu_gradients(grad: Tensor, x: Tensor, bias: Tensor | None, tanh: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((0,)) if bias is None else torch.empty_like(bias)


def _register_gradient(namespace: str, name: str, gradient: Callable[..., Any]) -> None:
    """Forward takes x, perhaps a bias, and options; `gradient` the same behind the gradient of the output."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.is_tensor = [isinstance(value, Tensor) for value in inputs]
        ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))
        ctx.options = [value for value in inputs if not isinstance(value, Tensor)]

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors, options = iter(ctx.saved_tensors), iter(ctx.options)
        inputs = [next(tensors) if is_tensor else next(options) for is_tensor in ctx.is_tensor]
        found = gradient(grad.contiguous(), *inputs)
        gradients = iter(found if isinstance(found, tuple | list) else (found,))
        return tuple(next(gradients) if is_tensor else None for is_tensor in ctx.is_tensor)

    torch.library.register_autograd(f"{namespace}::{name}_forward", backward, setup_context=save)


def _native(name: str) -> Function:
    return lambda ops, x, *options: getattr(ops, name)(x.contiguous(), *options)


def _native_gelu(ops: Any, x: Tensor, tanh: bool) -> Tensor:
    return ops.gelu_forward(x.contiguous(), None, tanh)


def _native_bias_gelu(ops: Any, x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    readable = bias if bias.dtype in (x.dtype, torch.float32) else bias.float()
    return ops.gelu_forward(x.contiguous(), readable.contiguous(), tanh)


def _unsupported(x: Tensor, *options: bool) -> str | None:
    return unsupported_floats(x)


def _unsupported_pair(x: Tensor, *options: bool) -> str | None:
    if x.dim() == 0 or x.shape[-1] % 2:
        return f"{described(x)}: an even last dimension would do"
    return unsupported_floats(x)


def _unsupported_bias(x: Tensor, bias: Tensor, tanh: bool) -> str | None:
    if bias.shape != x.shape[-1:]:
        return f"x {described(x)} and a bias {described(bias)}: a bias with a number for every column of x would do"
    return unsupported_floats(x, bias)


def _operation(name: str, formula: Function, fused: Function, native: Function, unsupported: Function) -> Operation:
    return Operation(name, formula, torch_function(fused), Native("activation", native, unsupported))


OPERATIONS = (
    _operation("gelu", gelu, torch_gelu, _native_gelu, _unsupported),
    _operation("bias_gelu", bias_gelu, torch_bias_gelu, _native_bias_gelu, _unsupported_bias),
    _operation("swiglu", swiglu, torch_swiglu, _native("swiglu_forward"), _unsupported_pair),
    _operation("geglu", geglu, torch_geglu, _native("geglu_forward"), _unsupported_pair),
    Operation("squared_relu", squared_relu, native=Native("activation", _native("squared_relu_forward"), _unsupported)),
)
