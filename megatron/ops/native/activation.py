"""Activations, gated ones and GELU of a sum with a bias through csrc/: only the input is kept for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.ops.native.operation import Operation


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


def _half_erf_on_cpu(x: Tensor, tanh: bool) -> bool:
    return not tanh and x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16)


OPERATIONS = (
    Operation("swiglu", "activation", _swiglu),
    Operation("geglu", "activation", _geglu),
    Operation(
        "gelu",
        "activation",
        _gelu,
        beaten=_half_erf_on_cpu,
        note="; by erf in half precision on a CPU PyTorch's own, which is faster",
    ),
    Operation("bias_gelu", "activation", _bias_gelu),
    Operation("squared_relu", "activation", _squared_relu),
)
