"""The operations that csrc/ has kernels for: how torch sees them (shapes, gradients) and when they can be used."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from megatron.errors import ConfigError
from megatron.ops.native import activation, attention, cross_entropy, norm, optim, rope, softmax
from megatron.ops.native.operation import Operation

_MODULES = (activation, attention, cross_entropy, norm, optim, rope, softmax)
OPERATIONS: dict[str, Operation] = {op.name: op for module in _MODULES for op in module.OPERATIONS}
WITHOUT_DERIVATIVE = (  # the derivatives themselves (RoPE's is RoPE again), and what only our own gradients call
    "swiglu_backward",
    "geglu_backward",
    "gelu_backward",
    "squared_relu_backward",
    "norm_backward",
    "softmax_backward",
    "attention_backward",
    "square_sum",
    "xent_backward",
    "xent_statistics",
)


def register(namespace: str) -> None:
    """Tell torch the shapes and gradients of the operations of a loaded library."""
    for module in _MODULES:
        module.register(namespace)
    for name in WITHOUT_DERIVATIVE:
        if hasattr(getattr(torch.ops, namespace), name):
            _refuse_to_differentiate(namespace, name)


def _refuse_to_differentiate(namespace: str, name: str) -> None:
    """PyTorch would take the derivative for zero, with a warning."""

    def refuse(ctx: Any, *grads: Any) -> NoReturn:
        raise ConfigError(f"{name}: this native kernel has no derivative; --kernels ref has one")

    torch.library.register_autograd(f"{namespace}::{name}", refuse)
