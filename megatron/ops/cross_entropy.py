"""Cross-entropy of every token, without a reduction."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.ops.operation import (
    Native,
    Operation,
    described,
    register_shapes,
    torch_function,
    unsupported_devices,
    unsupported_floats,
    without_derivative,
)
from megatron.utils.dtype import widened


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Loss of every token: logits [tokens, vocabulary], labels [tokens] -> [tokens]."""
    wide = widened(logits)
    return torch.logsumexp(wide, dim=-1) - wide.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


# ---------------------------------------------------------------- PyTorch's own functions


def torch_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(widened(logits), labels, reduction="none")


# ---------------------------------------------------------------- the kernels of csrc/


def register(namespace: str) -> None:
    ops = getattr(torch.ops, namespace)

    register_shapes(
        namespace,
        xent_forward=lambda logits, *_: logits.new_empty((2, logits.shape[0]), dtype=torch.float32),
        xent_backward=lambda grad, logits, *_: logits.new_empty(logits.shape),
        xent_statistics=lambda logits, *_: logits.new_empty((3, logits.shape[0]), dtype=torch.float32),
        xent_gradient_=lambda *args: None,
        xent_in_place_=lambda logits, *_: logits.new_empty(logits.shape[:1], dtype=torch.float32),
    )

    def save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, labels, output = ctx.saved_tensors
        return ops.xent_backward(grad[0].contiguous(), logits, labels, output[1]), None

    torch.library.register_autograd(f"{namespace}::xent_forward", backward, setup_context=save)
    without_derivative(namespace, "xent_backward", "xent_statistics")


def _native_cross_entropy(ops: Any, logits: Tensor, labels: Tensor) -> Tensor:
    neighbours = logits if logits.stride(-1) == 1 else logits.contiguous()
    return ops.xent_forward(neighbours, labels.contiguous())[0]


def _unsupported(logits: Tensor, labels: Tensor) -> str | None:
    if logits.dim() != 2 or labels.dtype != torch.int64 or labels.shape != logits.shape[:1]:
        return (
            f"logits {described(logits)} with labels {described(labels)}: "
            "the kernel needs [tokens, vocabulary] with int64 [tokens]"
        )
    return unsupported_floats(logits) or unsupported_devices(logits, labels)


OPERATIONS = (
    Operation(
        "cross_entropy",
        cross_entropy,
        torch_function(torch_cross_entropy),
        Native("cross_entropy", _native_cross_entropy, _unsupported, left_to_compiler=False),
    ),
)
