"""Scaled, masked softmax of attention scores."""

from typing import Any

import torch
from torch import Tensor

from megatron.ops.operation import (
    Native,
    Operation,
    broadcasts,
    described,
    register_shapes,
    unsupported_devices,
    unsupported_floats,
    without_derivative,
)
from megatron.utils.dtype import widened


def softmax(scores: Tensor, mask: Tensor | None, scale: float, causal: bool = False) -> Tensor:
    """Softmax of scale * scores over the positions where `mask` is true; scores [..., queries, keys].

    `causal` also hides the positions that `causal_mask` hides.
    """
    wide = widened(scores) * scale
    if causal:
        wide = wide.masked_fill(~causal_mask(scores.shape[-2], scores.shape[-1], scores.device), float("-inf"))
    if mask is not None:
        wide = wide.masked_fill(~mask, float("-inf"))
    return torch.softmax(wide, dim=-1).to(scores.dtype)


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Returns [queries, keys], true for visible keys; the last query sees every key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def readable(mask: Tensor, keys: int) -> Tensor:
    """Reshapes a mask of up to four dimensions to [batch or 1, heads or 1, queries or 1, keys], keys contiguous."""
    mask = mask[(None,) * (4 - mask.dim())].expand(-1, -1, -1, keys)
    return mask if mask.stride(3) == 1 else mask.contiguous()


# ---------------------------------------------------------------- the kernels of csrc/
# The backward pass keeps the probabilities.


def register(namespace: str) -> None:
    ops = getattr(torch.ops, namespace)

    register_shapes(
        namespace,
        softmax_forward=lambda scores, *_: torch.empty_like(scores),
        softmax_backward=lambda grad, *_: torch.empty_like(grad),
    )

    def save(ctx: Any, inputs: tuple[Tensor, Tensor | None, int, float], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.diagonal, ctx.scale = inputs[2:]

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (out,) = ctx.saved_tensors
        return ops.softmax_backward(grad.contiguous(), out, ctx.diagonal, ctx.scale), None, None, None

    torch.library.register_autograd(f"{namespace}::softmax_forward", backward, setup_context=save)
    without_derivative(namespace, "softmax_backward")


def _native_softmax(ops: Any, scores: Tensor, mask: Tensor | None, scale: float, causal: bool = False) -> Tensor:
    queries, keys = scores.shape[-2:]
    # Leading dimensions of one are added, or the first ones folded.
    four = (scores.flatten(0, -4) if scores.dim() > 4 else scores[(None,) * (4 - scores.dim())]).contiguous()
    if mask is not None:
        mask = readable(mask if scores.dim() <= 4 else mask.expand(scores.shape).flatten(0, -4), keys)
    return ops.softmax_forward(four, mask, keys - queries if causal else keys, scale).view(scores.shape)


def _unsupported(scores: Tensor, mask: Tensor | None, scale: float, causal: bool = False) -> str | None:
    if scores.dim() < 2:
        return f"scores {described(scores)}: the kernel needs [..., queries, keys]"
    if mask is not None and (mask.dtype != torch.bool or not broadcasts(mask.shape, scores.shape)):
        given = f"scores {described(scores)} with a mask {described(mask)}"
        return f"{given}: the kernel needs a bool mask that broadcasts to them"
    return unsupported_floats(scores) or unsupported_devices(scores, mask)


OPERATIONS = (Operation("softmax", softmax, native=Native("softmax", _native_softmax, _unsupported)),)
