"""Attention on a CPU through csrc/: scores exist for a block of queries and a block of keys at a time, and the backward
pass computes them again. On CUDA PyTorch's own is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.ops.fused_qkv import Triple, whole
from megatron.ops.native.operation import Operation, broadcasts, described, unsupported_devices, unsupported_floats

_FEW = 16  # queries for which it does not pay to lay out the keys


def register(namespace: str) -> None:
    ops = getattr(torch.ops, namespace)
    if not hasattr(ops, "attention_forward"):  # a CPU's alone
        return

    @torch.library.register_fake(f"{namespace}::attention_forward")
    def _(query: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        batch, queries, heads, _ = query.shape
        return query.new_empty(query.shape), query.new_empty(batch, heads, queries, dtype=torch.float32)

    @torch.library.register_fake(f"{namespace}::attention_backward")
    def _(grad: Tensor, query: Tensor, key: Tensor, *args: Any) -> Tensor:
        return query.new_empty(query.numel() + 2 * key.numel())

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, mask, ctx.diagonal, ctx.scale, ctx.dropout, seed = inputs
        ctx.save_for_backward(*tensors, *output, mask, seed)

    def backward(ctx: Any, grad: Tensor, of_log_sum_exp: Tensor) -> tuple[Tensor | None, ...]:
        """Nothing is made of the log-sum-exp but these gradients."""
        query, key, value, out, log_sum_exp, mask, seed = ctx.saved_tensors
        thirds = whole((query, key, value)) is not None
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        options = (mask, ctx.diagonal, ctx.scale, ctx.dropout, seed)
        grads = ops.attention_backward(grad, query, key, value, out, log_sum_exp, *options, thirds)
        return *_apart(grads, query, key, thirds), *(None,) * 5

    torch.library.register_autograd(f"{namespace}::attention_forward", backward, setup_context=save)


def _apart(grads: Tensor, query: Tensor, key: Tensor, thirds: bool) -> Triple:
    """The gradients of query, key and value in what the backward pass returns: thirds of each head's numbers, or one
    behind the other."""
    if thirds:
        of_query, of_key, of_value = grads.view(*query.shape[:3], 3, query.shape[3]).unbind(3)
        return of_query, of_key, of_value
    parts = grads.split((query.numel(), key.numel(), key.numel()))
    return parts[0].view(query.shape), parts[1].view(key.shape), parts[2].view(key.shape)


def _attention(ops: Any) -> Callable[..., Tensor]:
    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None,
        causal: bool,
        scale: float,
        dropout_p: float = 0.0,
        layer_scaling: int = 1,  # the scores stay in fp32
    ) -> Tensor:
        queries, keys = query.shape[2], key.shape[2]
        tensors = [
            t.transpose(1, 2) if t.stride(3) == 1 else t.transpose(1, 2).contiguous() for t in (query, key, value)
        ]
        if mask is not None:
            mask = mask[(None,) * (4 - mask.dim())].expand(
                -1, -1, -1, keys
            )  # [batch or 1, heads or 1, queries or 1, keys]
            mask = mask if mask.stride(3) == 1 else mask.contiguous()
        # Drawn where torch's own dropout would draw: what replays that replays this.
        seed = torch.randint(2**62, (1,)) if dropout_p > 0.0 else None
        diagonal = keys - queries if causal else keys
        out, _ = ops.attention_forward(*tensors, mask, diagonal, scale, dropout_p, seed)
        return out.transpose(1, 2)  # [batch, heads, queries, d], in the layout that the next projection reads

    return attention


def _unsupported(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, **named: Any) -> str | None:
    if query.dim() != 4 or key.dim() != 4:
        return f"queries {described(query)}, keys {described(key)}: [batch, heads, positions, width] would do"
    if value.shape != key.shape or not query.dtype == key.dtype == value.dtype:
        return f"values {described(value)} for keys {described(key)}: the same shape and type would do"
    batch, heads, queries, width = query.shape
    if key.shape[::3] != (batch, width) or key.shape[1] == 0 or heads % key.shape[1]:
        return f"keys {described(key)} for queries {described(query)}: a key for every so many heads would do"
    if 0 in key.shape[2:]:
        return f"keys {described(key)}: a number of a key at least would do"
    whole = (batch, heads, queries, key.shape[2])
    if mask is not None and (mask.dtype != torch.bool or not broadcasts(mask.shape, whole)):
        return f"a mask {described(mask)} for scores {whole}: bool that broadcasts to them would do"
    return unsupported_floats(query, key, value) or unsupported_devices(query, mask)


def _few_queries(query: Tensor, key: Tensor, *args: Any, **named: Any) -> bool:
    return query.shape[2] < min(_FEW, key.shape[2])


OPERATIONS = (
    Operation(
        "attention",
        "",
        _attention,
        unsupported=_unsupported,
        left_to_compiler=False,
        beaten=_few_queries,
        note=", scores of a block at a time; generation by PyTorch's own",
    ),
)
