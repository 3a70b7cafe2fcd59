"""Activations, gated ones and GELU of a sum with a bias through csrc/: only the input is kept for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.ops.native.operation import Operation, described, unsupported_floats


def register(namespace: str) -> None:
    ops = getattr(torch.ops, namespace)
    for name in ("swiglu", "geglu"):
        _register(namespace, name, getattr(ops, f"{name}_backward"), _half)
    for name in ("gelu", "squared_relu"):
        _register(namespace, name, getattr(ops, f"{name}_backward"), torch.empty_like)

    @torch.library.register_fake(f"{namespace}::swiglu_backward")
    def _(grad: Tensor, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    @torch.library.register_fake(f"{namespace}::geglu_backward")
    def _(grad: Tensor, x: Tensor, tanh: bool) -> Tensor:
        return torch.empty_like(x)

    @torch.library.register_fake(f"{namespace}::gelu_backward")
    def _(grad: Tensor, x: Tensor, bias: Tensor | None, tanh: bool) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), x.new_empty((0,)) if bias is None else torch.empty_like(bias)

    @torch.library.register_fake(f"{namespace}::squared_relu_backward")
    def _(grad: Tensor, x: Tensor) -> Tensor:
        return torch.empty_like(x)


def _half(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _register(namespace: str, name: str, gradient: Callable[..., Any], shape: Callable[[Tensor], Tensor]) -> None:
    """Forward takes x, perhaps a bias, and options; `gradient` the same behind the gradient of the output."""

    @torch.library.register_fake(f"{namespace}::{name}_forward")
    def _(x: Tensor, *_: Any) -> Tensor:
        return shape(x)

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


def _swiglu(ops: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: ops.swiglu_forward(x.contiguous())


def _geglu(ops: Any) -> Callable[[Tensor, bool], Tensor]:
    return lambda x, tanh: ops.geglu_forward(x.contiguous(), tanh)


def _gelu(ops: Any) -> Callable[[Tensor, bool], Tensor]:
    return lambda x, tanh: ops.gelu_forward(x.contiguous(), None, tanh)


def _bias_gelu(ops: Any) -> Callable[[Tensor, Tensor, bool], Tensor]:
    def bias_gelu(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
        readable = bias if bias.dtype in (x.dtype, torch.float32) else bias.float()
        return ops.gelu_forward(x.contiguous(), readable.contiguous(), tanh)

    return bias_gelu


def _squared_relu(ops: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: ops.squared_relu_forward(x.contiguous())


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


OPERATIONS = (
    Operation("swiglu", "activation", _swiglu, _unsupported_pair),
    Operation("geglu", "activation", _geglu, _unsupported_pair),
    Operation("gelu", "activation", _gelu, _unsupported),
    Operation("bias_gelu", "activation", _bias_gelu, _unsupported_bias),
    Operation("squared_relu", "activation", _squared_relu, _unsupported),
)
