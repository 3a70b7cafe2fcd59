"""Queries, keys and values as thirds of one tensor, and their gradients as thirds of its gradient, without copies.

The backward pass of a plain split would copy the gradients into one tensor. If attention's backward has already placed
them side by side, `split_qkv` passes on the whole tensor.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

Triple = tuple[Tensor, Tensor, Tensor]  # of query, key and value


def split_qkv(qkv: Tensor) -> Triple:
    """Splits [batch, seq, groups, query heads per group + 2, d] by head: [batch, seq, heads or groups, d] each."""
    if qkv.shape[3] == 3 and not torch.is_grad_enabled():
        return _thirds(qkv)
    if qkv.shape[3] == 3 and not torch.compiler.is_compiling():
        return _Thirds.apply(qkv)
    query, key, value = qkv.split((qkv.shape[3] - 2, 1, 1), dim=3)
    return query.flatten(2, 3), key.squeeze(3), value.squeeze(3)


def whole(thirds: Triple) -> Tensor | None:
    """Returns the tensor [batch, seq, heads, 3, d] of which the three [batch, seq, heads, d] are views, or None. It is
    None under torch.compile, which cannot trace addresses and would leave the whole block uncompiled."""
    if torch.compiler.is_compiling():
        return None
    first, width = thirds[0], thirds[0].shape[-1]
    shape = (*first.shape[:3], 3, width)
    strides = torch.empty(shape, device="meta").stride()
    for place, third in enumerate(thirds):
        if third.shape != first.shape or third.stride() != (*strides[:3], 1) or third.dtype != first.dtype:
            return None
        if third.data_ptr() - first.data_ptr() != place * width * first.element_size():
            return None
        if third.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
    return first.as_strided(shape, strides)


def _thirds(qkv: Tensor) -> Triple:
    query, key, value = qkv.unbind(3)
    return query, key, value


class _Thirds(Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor) -> Triple:
        return _thirds(qkv)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        query, key, value = grads
        together = whole((query, key, value))
        return torch.stack(grads, dim=3) if together is None else together
