"""SwiGLU through csrc/: only the input is kept for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.ops.native.operation import Operation


def register(namespace: str) -> None:
    ops = getattr(torch.ops, namespace)

    @torch.library.register_fake(f"{namespace}::swiglu_forward")
    def _(x: Tensor) -> Tensor:
        return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))

    @torch.library.register_fake(f"{namespace}::swiglu_backward")
    def _(grad: Tensor, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ops.swiglu_backward(grad.contiguous(), *ctx.saved_tensors)

    torch.library.register_autograd(f"{namespace}::swiglu_forward", backward, setup_context=save)


def _swiglu(ops: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: ops.swiglu_forward(x.contiguous())


OPERATIONS = (Operation("swiglu", "activation", _swiglu),)
