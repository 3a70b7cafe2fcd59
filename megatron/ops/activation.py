"""Activations, plain and gated."""

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


def torch_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)  # [..., ffn] each
    return F.silu(gate) * up


def torch_geglu(x: Tensor, tanh: bool) -> Tensor:
    gate, up = x.chunk(2, dim=-1)  # [..., ffn] each
    return torch_gelu(gate, tanh) * up


# ---------------------------------------------------------------- the kernels of csrc/
# The backward pass keeps only the input.


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
        gelu_backward=lambda grad, x, tanh: torch.empty_like(x),
        squared_relu_backward=lambda grad, x: torch.empty_like(x),
    )
    for name in ("swiglu", "geglu", "gelu", "squared_relu"):
        _register_gradient(namespace, name, getattr(ops, f"{name}_backward"))
        without_derivative(namespace, f"{name}_backward")


def _half(x: Tensor, *options: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _same(x: Tensor, *options: bool) -> Tensor:
    return torch.empty_like(x)


def _register_gradient(namespace: str, name: str, gradient: Callable[..., Tensor]) -> None:
    """Registers a gradient. Forward takes (x, *options); `gradient` takes (gradient of the output, x, *options)."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, *ctx.options = inputs
        ctx.save_for_backward(x)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return gradient(grad.contiguous(), *ctx.saved_tensors, *ctx.options), *(None for _ in ctx.options)

    torch.library.register_autograd(f"{namespace}::{name}_forward", backward, setup_context=save)


def _native(name: str) -> Function:
    return lambda ops, x, *options: getattr(ops, name)(x.contiguous(), *options)


def _unsupported(x: Tensor, *options: bool) -> str | None:
    return unsupported_floats(x)


def _unsupported_pair(x: Tensor, *options: bool) -> str | None:
    if x.dim() == 0 or x.shape[-1] % 2:
        return f"{described(x)}: the kernel needs an even last dimension"
    return unsupported_floats(x)


def _operation(name: str, formula: Function, fused: Function, native: Function, unsupported: Function) -> Operation:
    return Operation(name, formula, torch_function(fused), Native("activation", native, unsupported))


OPERATIONS = (
    _operation("gelu", gelu, torch_gelu, _native("gelu_forward"), _unsupported),
    _operation("swiglu", swiglu, torch_swiglu, _native("swiglu_forward"), _unsupported_pair),
    _operation("geglu", geglu, torch_geglu, _native("geglu_forward"), _unsupported_pair),
    Operation("squared_relu", squared_relu, native=Native("activation", _native("squared_relu_forward"), _unsupported)),
)
