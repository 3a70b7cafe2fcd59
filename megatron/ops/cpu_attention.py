"""Attention on a CPU as matrix products over blocks of queries: what is above the diagonal is not computed.

PyTorch's own CPU attention does not gain from bf16 products and its backward pass is several times their cost. This
keeps the probabilities (batch * heads * seq^2 * 0.6 elements per layer), so longer sequences are left to PyTorch's.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.ops import builtin, ref

# Up to these lengths it was measured to be so much faster that the memory is worth it (docs/performance.md).
MAX_KEYS, MAX_KEYS_HALF = 1024, 2048


class ScoresMath(Protocol):
    """What is done in place to scores [batch, heads, queries, keys], of which query i sees the keys up to i + diagonal
    that `mask` allows."""

    def softmax_(self, scores: Tensor, mask: Tensor | None, diagonal: int, scale: float) -> None:
        """scores become softmax(scale * scores)."""

    def softmax_backward_(self, grad: Tensor, probabilities: Tensor, diagonal: int, scale: float) -> None:
        """The gradient of the probabilities becomes that of the scores."""


class TorchScores:
    """See `ScoresMath`."""

    def softmax_(self, scores: Tensor, mask: Tensor | None, diagonal: int, scale: float) -> None:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(diagonal)
        scores.copy_(ref.softmax(scores, visible if mask is None else mask & visible, scale))

    def softmax_backward_(self, grad: Tensor, probabilities: Tensor, diagonal: int, scale: float) -> None:
        grad.copy_(torch._softmax_backward_data(grad, probabilities, -1, grad.dtype)).mul_(scale)


TORCH_SCORES: ScoresMath = TorchScores()


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
    math: ScoresMath = TORCH_SCORES,
) -> Tensor:
    """See `ref.attention`."""
    seq, longest = query.shape[2], MAX_KEYS_HALF if query.dtype == torch.bfloat16 else MAX_KEYS
    # A few queries against a cache are no square; fp16 products are slow on a CPU and their scores may overflow.
    if not 1 < seq == key.shape[2] <= longest or query.dtype == torch.float16:
        return builtin.sdpa(query, key, value, mask=mask, causal=causal, scale=scale, dropout_p=dropout_p)
    if query.dtype == torch.float64:
        math = TORCH_SCORES
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())].expand(-1, -1, -1, seq)  # [batch or 1, heads or 1, seq or 1, seq]
        mask = mask if mask.stride(3) == 1 else mask.contiguous()
    return _BlockedAttention.apply(query, key, value, mask, causal, scale, dropout_p, math)


def _block(seq: int) -> int:
    """More queries a block: fewer, larger products, and more of what is above the diagonal."""
    return 64 if seq <= 256 else 128 if seq < 1024 else 256


def _blocks(seq: int, causal: bool) -> list[tuple[slice, int, int]]:
    """(queries, keys that they see together, diagonal): without `causal` a mask decides, so all keys."""
    blocks = [slice(start, min(start + _block(seq), seq)) for start in range(0, seq, _block(seq))]
    return [(part, part.stop, part.start) if causal else (part, seq, seq) for part in blocks]


class _BlockedAttention(torch.autograd.Function):
    """Query heads that share a key are stacked as further rows of one product: keys are never repeated."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,  # [batch, heads, seq, d]
        key: Tensor,  # [batch, groups, seq, d]
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
        dropout_p: float,
        math: ScoresMath,
    ) -> Tensor:
        (batch, heads, seq, width), groups = query.shape, key.shape[1]
        key, value = (t.reshape(batch * groups, seq, width) for t in (key, value))
        out = query.new_empty(batch, seq, heads, width).transpose(1, 2)  # the layout the next projection reads
        saved = []
        for part, keys, diagonal in _blocks(seq, causal):
            rows = query[:, :, part].reshape(batch * groups, -1, width)  # [batch * groups, heads per group * block, d]
            probabilities = torch.bmm(rows, _first(key, keys).transpose(1, 2))
            seen = None if mask is None else mask[:, :, part if mask.shape[2] > 1 else slice(None), :keys]
            math.softmax_(probabilities.view(batch, heads, -1, keys), seen, diagonal, scale)
            kept = None
            dropped = probabilities
            if dropout_p > 0.0:
                dropped, kept = torch.native_dropout(probabilities, dropout_p, True)
            out[:, :, part] = torch.bmm(dropped, _first(value, keys)).view(batch, heads, -1, width)
            saved += [rows, probabilities, kept]
        ctx.save_for_backward(key, value, *saved)
        ctx.shape, ctx.causal, ctx.scale, ctx.dropout_p, ctx.math = query.shape, causal, scale, dropout_p, math
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        batch, heads, seq, width = ctx.shape
        key, value, *saved = ctx.saved_tensors
        # Every block adds to these, so they are wide; the result is rounded once.
        wide = torch.promote_types(key.dtype, torch.float32)
        grad_key, grad_value = torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)
        grad_query = grad.new_empty(batch, seq, heads, width).transpose(1, 2)
        for index, (part, keys, diagonal) in enumerate(_blocks(seq, ctx.causal)):
            rows, probabilities, kept = saved[3 * index : 3 * index + 3]
            upstream = grad[:, :, part].reshape(len(key), -1, width)
            dropped = probabilities
            grad_scores = torch.bmm(upstream, _first(value, keys).transpose(1, 2))
            if kept is not None:
                factor = kept.to(probabilities.dtype) * (1.0 / (1.0 - ctx.dropout_p) if ctx.dropout_p < 1.0 else 0.0)
                dropped, grad_scores = probabilities * factor, grad_scores * factor
            _add_product(grad_value[:, :keys], dropped, upstream)
            four = (batch, heads, -1, keys)
            ctx.math.softmax_backward_(grad_scores.view(four), probabilities.view(four), diagonal, ctx.scale)
            grad_query[:, :, part] = torch.bmm(grad_scores, _first(key, keys)).view(batch, heads, -1, width)
            _add_product(grad_key[:, :keys], grad_scores, rows)
        shape = (batch, -1, seq, width)
        return grad_query, grad_key.view(shape).to(key.dtype), grad_value.view(shape).to(key.dtype), *(None,) * 5


def _first(tensor: Tensor, keys: int) -> Tensor:
    """[many, seq, d] -> [many, keys, d], side by side: products would copy any other layout, and slower."""
    return tensor[:, :keys].contiguous()


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left.T @ right"""
    if total.dtype == left.dtype:
        total.baddbmm_(left.transpose(1, 2), right)
    else:
        total += torch.bmm(left.transpose(1, 2), right)
