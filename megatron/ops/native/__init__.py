"""The operations that csrc/ has kernels for: how torch sees them (shapes, gradients) and when they can be used."""

from __future__ import annotations

from megatron.ops.native import activation, cross_entropy, norm, optim, rope, softmax
from megatron.ops.native.operation import Operation

_MODULES = (activation, cross_entropy, norm, optim, rope, softmax)
OPERATIONS: dict[str, Operation] = {op.name: op for module in _MODULES for op in module.OPERATIONS}


def register(namespace: str) -> None:
    """Tell torch the shapes and gradients of the operations of a loaded library."""
    for module in _MODULES:
        module.register(namespace)
