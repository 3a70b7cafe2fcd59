"""Cross-entropy through csrc/: by itself, and behind the head's matrix product, where the logits become their own
gradient in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.ops.linear_cross_entropy import linear_cross_entropy
from megatron.ops.native.operation import Operation, described, unsupported_devices, unsupported_floats


def register(namespace: str) -> None:
    ops = getattr(torch.ops, namespace)

    @torch.library.register_fake(f"{namespace}::xent_forward")
    def _(logits: Tensor, labels: Tensor) -> Tensor:
        return logits.new_empty((2, logits.shape[0]), dtype=torch.float32)

    @torch.library.register_fake(f"{namespace}::xent_backward")
    def _(grad: Tensor, logits: Tensor, labels: Tensor, log_sum_exp: Tensor) -> Tensor:
        return logits.new_empty(logits.shape)

    @torch.library.register_fake(f"{namespace}::xent_statistics")
    def _(logits: Tensor, labels: Tensor, first: int, columns: int, vocabulary: int) -> Tensor:
        return logits.new_empty((3, logits.shape[0]), dtype=torch.float32)

    @torch.library.register_fake(f"{namespace}::xent_gradient_")
    def _(logits: Tensor, labels: Tensor, log_sum_exp: Tensor, grad: Tensor, first: int, columns: int) -> None:
        return None

    @torch.library.register_fake(f"{namespace}::xent_in_place_")
    def _(logits: Tensor, labels: Tensor, columns: int) -> Tensor:
        return logits.new_empty(logits.shape[:1], dtype=torch.float32)

    def save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, labels, output = ctx.saved_tensors
        return ops.xent_backward(grad[0].contiguous(), logits, labels, output[1]), None

    torch.library.register_autograd(f"{namespace}::xent_forward", backward, setup_context=save)


def _cross_entropy(ops: Any) -> Callable[[Tensor, Tensor], Tensor]:
    def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
        neighbours = logits if logits.stride(-1) == 1 else logits.contiguous()
        return ops.xent_forward(neighbours, labels.contiguous())[0]

    return cross_entropy


def _unsupported(logits: Tensor, labels: Tensor) -> str | None:
    if logits.dim() != 2 or labels.dtype != torch.int64 or labels.shape != logits.shape[:1]:
        return (
            f"logits {described(logits)} with labels {described(labels)}: "
            "[tokens, vocabulary] with int64 [tokens] would do"
        )
    return unsupported_floats(logits) or unsupported_devices(logits, labels)


def _unsupported_linear(
    hidden: Tensor, weight: Tensor, labels: Tensor, vocab_size: int, workspace: Any = None, part: Any = None
) -> str | None:
    matrices = hidden.dim() == weight.dim() == 2 and hidden.shape[1] == weight.shape[1]
    if not matrices or labels.dtype != torch.int64 or labels.shape != hidden.shape[:1]:
        return (
            f"hidden {described(hidden)}, weight {described(weight)} and labels {described(labels)}: "
            "[tokens, hidden], [vocabulary, hidden] and int64 [tokens] would do"
        )
    return unsupported_floats(hidden, weight) or unsupported_devices(hidden, labels)


class NativeLogits:
    """See `logits.LogitsMath`."""

    def __init__(self, ops: Any) -> None:
        self.ops = ops

    def statistics(self, logits: Tensor, labels: Tensor, first: int, columns: int, vocab_size: int) -> Tensor:
        return self.ops.xent_statistics(logits, labels, first, columns, vocab_size)

    def gradient_(
        self, logits: Tensor, labels: Tensor, log_sum_exp: Tensor, grad: Tensor, first: int, columns: int
    ) -> None:
        self.ops.xent_gradient_(logits, labels, log_sum_exp, grad, first, columns)

    def in_place_(self, logits: Tensor, labels: Tensor, columns: int) -> Tensor:
        return self.ops.xent_in_place_(logits, labels, columns)


def _linear_cross_entropy(ops: Any) -> Callable[..., Tensor]:
    return partial(linear_cross_entropy, math=NativeLogits(ops))


OPERATIONS = (
    Operation("cross_entropy", "xent", _cross_entropy, _unsupported, left_to_compiler=False),
    Operation("linear_cross_entropy", "xent", _linear_cross_entropy, _unsupported_linear, left_to_compiler=False),
)
