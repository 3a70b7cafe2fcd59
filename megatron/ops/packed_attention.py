"""Causal attention within documents, and within a window.

No tensor [queries, keys] is made, except by the formula. A CPU's kernel takes the first key that each query sees. On a
GPU torch's flash attention takes the documents' boundaries, and its memory-efficient attention does so for fp32.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.ops import attention as plain
from megatron.ops.blocked_attention import blocked_attention
from megatron.ops.documents import Documents
from megatron.ops.operation import Function, Implementation, Native, Operation, Target, described
from megatron.ops.sdpa import sdpa
from megatron.utils.dtype import HALF

_WIDTH, _WIDEST = 8, 256
"""Both kernels take heads whose width is a multiple of the first number; flash attention takes at most the second."""
_CAUSAL_FROM_BOTTOM_RIGHT = 2


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    documents: Documents,
    left: int | None,
    scale: float,
    dropout_p: float = 0.0,
    layer_scaling: int = 1,
) -> Tensor:
    """query [batch, heads, queries, d], key and value [batch, groups, keys, d] -> [batch, heads, queries, d].

    A query sees the keys of its document up to its own place, at most `left` before it."""
    return plain.attention(
        query,
        key,
        value,
        mask=documents.mask(query.shape[2], left),
        causal=False,
        scale=scale,
        dropout_p=dropout_p,
        layer_scaling=layer_scaling,
    )


def _with_mask(function: Function, *tensors: Tensor, documents: Documents, left: int | None, **named: Any) -> Tensor:
    mask = documents.mask(tensors[0].shape[2], left)
    out: Tensor = function(*tensors, mask=mask, causal=False, **named)
    return out


def _native(
    ops: Any, query: Tensor, key: Tensor, value: Tensor, *, documents: Documents, left: int | None, **named: Any
) -> Tensor:
    first = documents.first_keys(query.shape[2], left)
    return plain.native_attention(ops, query, key, value, mask=None, first_keys=first, causal=True, **named)


def _unsupported(query: Tensor, key: Tensor, value: Tensor, *, documents: Documents, **named: Any) -> str | None:
    if key.dim() == 4 and (documents.rows, documents.seq) != (key.shape[0], key.shape[2]):
        return (
            f"documents of {documents.rows} x {documents.seq} keys for keys {described(key)}: "
            "the kernel needs the same rows and length"
        )
    return plain.unsupported(query, key, value, mask=None)


# ---------------------------------------------------------------- PyTorch's own kernels on a GPU


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    documents: Documents,
    left: int | None,
    scale: float,
    dropout_p: float = 0.0,
    layer_scaling: int = 1,  # the scores stay in fp32
) -> Tensor:
    batch, _, queries, width = query.shape
    if query.dtype == torch.float64:  # neither kernel has it
        return packed_attention(
            query,
            key,
            value,
            documents=documents,
            left=left,
            scale=scale,
            dropout_p=dropout_p,
            layer_scaling=layer_scaling,
        )
    query, key, value = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))  # [tokens, heads or groups, d]
    if lacking := -width % _WIDTH:
        query, key, value = (F.pad(t, (0, lacking)) for t in (query, key, value))
    boundaries = documents.queries, documents.keys, min(queries, documents.longest), documents.longest
    kernel = _flash if query.dtype in HALF and width <= _WIDEST else _memory_efficient
    out = kernel(query, key, value, boundaries, left, scale, dropout_p)
    return out[..., :width].unflatten(0, (batch, queries)).transpose(1, 2)


Boundaries = tuple[Tensor, Tensor, int, int]  # of queries and of keys, and the largest number of each in a document


def _flash(
    query: Tensor, key: Tensor, value: Tensor, boundaries: Boundaries, left: int | None, scale: float, dropout_p: float
) -> Tensor:
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        *boundaries,
        dropout_p,
        True,  # causal, from the bottom right
        False,  # no mask of the dropout
        scale=scale,
        window_size_left=-1 if left is None else left,
        window_size_right=0,
    )[0]
    return out


def _memory_efficient(
    query: Tensor, key: Tensor, value: Tensor, boundaries: Boundaries, left: int | None, scale: float, dropout_p: float
) -> Tensor:
    if (repeat := query.shape[1] // key.shape[1]) > 1:
        key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
    out = torch.ops.aten._efficient_attention_forward(
        *(t.unsqueeze(0) for t in (query, key, value)),
        None,  # no bias
        *boundaries,
        dropout_p,
        _CAUSAL_FROM_BOTTOM_RIGHT,
        torch.is_grad_enabled(),
        scale=scale,
        window_size=None if left is None else left + 1,
    )[0]
    return out.squeeze(0)


# ---------------------------------------------------------------- the row


def _portable(target: Target) -> Implementation:
    if target.device_type == "cpu":
        return Implementation("cpu", partial(_with_mask, blocked_attention), "products over blocks of queries")
    if target.kind.cuda_libraries:
        reason = "PyTorch's flash attention with the documents' boundaries; memory-efficient attention in fp32"
        return Implementation("torch", varlen_attention, reason)
    return Implementation("torch", partial(_with_mask, sdpa), "PyTorch's own fused function, with a mask")


def _required(target: Target) -> Implementation | None:
    if target.attention in ("unfused", "local"):
        return Implementation("ref", packed_attention, f"--attention-backend {target.attention}")
    if target.attention in ("flash", "fused") and not target.kind.cuda_libraries:
        function = partial(_with_mask, sdpa)
        return Implementation("torch", function, f"--attention-backend {target.attention}: PyTorch's own, with a mask")
    return _portable(target) if target.attention in ("flash", "fused") else None


_NATIVE = Native("attention", _native, _unsupported, cpu_only=True, left_to_compiler=False)
OPERATIONS = (Operation("packed_attention", packed_attention, _portable, _NATIVE, _required),)
