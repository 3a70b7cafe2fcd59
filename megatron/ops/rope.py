"""Rotary position embedding."""

from typing import Any

import torch
from torch import Tensor

from megatron.ops.operation import Native, Operation, described, register_shapes, unsupported_floats


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first 2 * cos.shape[-1] channels of every head, halves paired (Hugging Face's convention).

    The shape of `x` is [batch, seq, heads, head_dim]. Both `cos` and `sin` are [batch or 1, seq, 1, rotated / 2], in
    the dtype of x.
    """
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]), dim=-1)
    return turned.to(x.dtype)  # angles may be wider


# ---------------------------------------------------------------- the kernels of csrc/
# x may be a view of a fused projection. The same kernel computes the gradient, as the inverse rotation.


def register(namespace: str) -> None:
    ops = getattr(torch.ops, namespace)

    register_shapes(namespace, rope=lambda x, *_: x.new_empty(x.shape))

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, cos, sin, ctx.backwards = inputs
        ctx.save_for_backward(cos, sin)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _turn(ops, grad, *ctx.saved_tensors, backwards=not ctx.backwards), None, None, None

    torch.library.register_autograd(f"{namespace}::rope", backward, setup_context=save)


def _turn(ops: Any, x: Tensor, cos: Tensor, sin: Tensor, *, backwards: bool) -> Tensor:
    together = x if x.stride(-1) == 1 else x.contiguous()
    return ops.rope(together, cos.contiguous(), sin.contiguous(), backwards)


def _native_rope(ops: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _turn(ops, x, cos, sin, backwards=False)


def _unsupported(x: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    fits = x.dim() == cos.dim() == 4 and cos.shape[:3] in ((1, x.shape[1], 1), (x.shape[0], x.shape[1], 1))
    if not fits or sin.shape != cos.shape or 2 * cos.shape[3] > x.shape[3]:
        return (
            f"x {described(x)} with angles {described(cos)} and {described(sin)}: "
            "the kernel needs [batch, seq, heads, head_dim] with [batch or 1, seq, 1, at most head_dim / 2]"
        )
    if cos.requires_grad or sin.requires_grad:
        return f"angles {tuple(cos.shape)} that require a gradient: the kernel needs detached angles"
    if cos.dtype not in (x.dtype, torch.float32) or sin.dtype != cos.dtype:
        given = f"x {described(x)} with angles {described(cos)} and {described(sin)}"
        return f"{given}: the kernel needs angles in the dtype of x or float32"
    return unsupported_floats(x, cos, sin)


OPERATIONS = (Operation("rope", rope, native=Native("rope", _native_rope, _unsupported)),)
