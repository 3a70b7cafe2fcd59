"""Causal attention on a CPU as matrix products over blocks of queries: what is above the diagonal is not computed.

PyTorch's own CPU attention does not gain from bf16 products and its backward pass is several times their cost. This
keeps the probabilities (batch * heads * seq^2 * 0.6 elements per layer), so longer sequences are left to PyTorch's.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.ops import builtin

# Up to these lengths it was measured to be faster: full precision 1.1 to 1.3 times, half precision 1.5 to 2.3 times.
MAX_KEYS, MAX_KEYS_HALF = 512, 1024


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float = 0.0,
    layer_scaling: int = 1,
) -> Tensor:
    """See `ref.attention`."""
    seq, longest = query.shape[2], MAX_KEYS_HALF if query.dtype == torch.bfloat16 else MAX_KEYS
    # A few queries against a cache are no square; fp16 products are slow on a CPU and their scores may overflow.
    if not 1 < seq == key.shape[2] <= longest or query.dtype == torch.float16:
        return builtin.sdpa(query, key, value, mask=mask, causal=causal, scale=scale, dropout_p=dropout_p)
    bias = _bias(mask, causal, query, key)
    return _BlockedAttention.apply(query, key, value, bias, causal, scale, dropout_p)


def _bias(mask: Tensor | None, causal: bool, query: Tensor, key: Tensor) -> Tensor:
    """What is added to the scores, 0 or -inf: [1 or batch * groups, heads per group * queries or 1, queries, keys]."""
    (batch, heads, seq, _), groups = query.shape, key.shape[1]
    hidden = torch.ones(seq, seq, dtype=torch.bool, device=query.device).triu(1) if causal else None
    if mask is not None:
        hidden = ~mask if hidden is None else hidden | ~mask
    bias = torch.zeros((seq, seq) if hidden is None else hidden.shape, dtype=query.dtype, device=query.device)
    if hidden is not None:
        bias.masked_fill_(hidden, -math.inf)
    if bias.dim() == 2 or bias.numel() == seq * seq:
        return bias.view(1, 1, seq, seq)
    return bias.expand(batch, heads, seq, seq).reshape(batch * groups, heads // groups, seq, seq)


def _visible(start: int, stop: int, seq: int, causal: bool) -> int:
    """Keys that the queries start..stop can see: without `causal` a mask decides, so all."""
    return stop if causal else seq


def _block(seq: int) -> int:
    return 64 if seq <= 256 else 128


class _BlockedAttention(torch.autograd.Function):
    """Query heads that share a key are stacked as further rows of one product: keys are never repeated."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,  # [batch, heads, seq, d]
        key: Tensor,  # [batch, groups, seq, d]
        value: Tensor,
        bias: Tensor,
        causal: bool,
        scale: float,
        dropout_p: float,
    ) -> Tensor:
        (batch, heads, seq, width), groups = query.shape, key.shape[1]
        ratio = heads // groups
        key, value = (t.reshape(batch * groups, seq, width) for t in (key, value))
        out = query.new_empty(batch, seq, heads, width).transpose(1, 2)  # the layout the next projection reads
        blocks = []
        for start in range(0, seq, _block(seq)):
            stop = min(start + _block(seq), seq)
            keys = _visible(start, stop, seq, causal)
            rows = query[:, :, start:stop].reshape(batch * groups, -1, width)  # [batch * groups, ratio * block, d]
            added = bias[:, :, start:stop, :keys]
            added = added.expand(-1, ratio, -1, -1).reshape(added.shape[0], -1, keys)
            scores = torch.baddbmm(added, rows, key[:, :keys].transpose(1, 2), alpha=scale)
            probabilities = torch.softmax(scores, dim=-1)
            kept = None
            dropped = probabilities
            if dropout_p > 0.0:
                dropped, kept = torch.native_dropout(probabilities, dropout_p, True)
            product = torch.bmm(dropped, value[:, :keys])
            out[:, :, start:stop] = product.view(batch, heads, stop - start, width)
            blocks += [rows, probabilities, kept]
        ctx.save_for_backward(key, value, *blocks)
        ctx.shape, ctx.causal, ctx.scale, ctx.dropout_p = query.shape, causal, scale, dropout_p
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        batch, heads, seq, width = ctx.shape
        key, value, *saved = ctx.saved_tensors
        many = key.shape[0]  # batch * groups
        # Every block adds to these, so they are wide; the result is rounded once.
        wide = torch.promote_types(key.dtype, torch.float32)
        grad_key, grad_value = torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)
        grad_query = grad.new_empty(batch, heads, seq, width)
        for index, start in enumerate(range(0, seq, _block(seq))):
            stop = min(start + _block(seq), seq)
            keys = _visible(start, stop, seq, ctx.causal)
            rows, probabilities, kept = saved[3 * index : 3 * index + 3]
            upstream = grad[:, :, start:stop].reshape(many, -1, width)
            dropped = probabilities
            grad_probabilities = torch.bmm(upstream, value[:, :keys].transpose(1, 2))
            if kept is not None:
                factor = kept.to(probabilities.dtype) * (1.0 / (1.0 - ctx.dropout_p) if ctx.dropout_p < 1.0 else 0.0)
                dropped, grad_probabilities = probabilities * factor, grad_probabilities * factor
            grad_value[:, :keys] += torch.bmm(dropped.transpose(1, 2), upstream)
            grad_scores = torch._softmax_backward_data(grad_probabilities, probabilities, -1, probabilities.dtype)
            product = torch.bmm(grad_scores, key[:, :keys])
            grad_query[:, :, start:stop] = product.view(batch, heads, stop - start, width)
            grad_key[:, :keys] += torch.bmm(grad_scores.transpose(1, 2), rows)
        grads = (grad_query.mul_(ctx.scale), grad_key.mul_(ctx.scale).to(key.dtype), grad_value.to(key.dtype))
        shape = (batch, -1, seq, width)
        return grads[0], grads[1].view(shape), grads[2].view(shape), None, None, None, None
