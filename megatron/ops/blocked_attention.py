"""Attention on a CPU as matrix products over blocks of queries. Blocks above the diagonal are skipped.

PyTorch's own CPU attention does not gain from bf16 products, and its backward pass costs several times as much. This
version keeps the probabilities (batch * heads * seq^2 * 0.6 elements per layer), so PyTorch's attention handles long
sequences.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.ops.sdpa import sdpa
from megatron.ops.softmax import readable, softmax

# Up to these lengths the measured speed-up is worth the memory (benchmarks/RESULTS.md).
MAX_KEYS, MAX_KEYS_HALF = 1024, 2048


# In place on scores [batch, heads, queries, keys]: query i sees the keys up to i + diagonal that `mask` allows.
def _softmax_(scores: Tensor, mask: Tensor | None, diagonal: int, scale: float) -> None:
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(diagonal)
    scores.copy_(softmax(scores, visible if mask is None else mask & visible, scale))


def _softmax_backward_(grad: Tensor, probabilities: Tensor, scale: float) -> None:
    grad.copy_(torch._softmax_backward_data(grad, probabilities, -1, grad.dtype)).mul_(scale)


def blocked_attention(
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
    """See `attention.attention`."""
    seq, longest = query.shape[2], MAX_KEYS_HALF if query.dtype == torch.bfloat16 else MAX_KEYS
    # A few queries against a cache are not square; fp16 products are slow on a CPU and their scores may overflow.
    square = 1 < seq == key.shape[2] <= longest and key.shape == value.shape
    if not square or query.dtype == torch.float16:
        return sdpa(query, key, value, mask=mask, causal=causal, scale=scale, dropout_p=dropout_p)
    if mask is not None:
        mask = readable(mask, seq)
    return _BlockedAttention.apply(query, key, value, mask, causal, scale, dropout_p)


def _block(seq: int) -> int:
    """Number of queries per block. Larger blocks mean fewer, larger products, but more work above the diagonal."""
    return 64 if seq <= 256 else 128 if seq < 1024 else 256


def _blocks(seq: int, causal: bool, block: int) -> list[tuple[slice, int, int]]:
    """Returns (queries, number of keys that they see together, diagonal) per block; all keys unless `causal`."""
    blocks = [slice(start, min(start + block, seq)) for start in range(0, seq, block)]
    return [(part, part.stop, part.start) if causal else (part, seq, seq) for part in blocks]


class _BlockedAttention(torch.autograd.Function):
    """Stacks query heads that share a key as rows of one product, so keys are never repeated."""

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
    ) -> Tensor:
        (batch, heads, seq, width), groups = query.shape, key.shape[1]
        key, value = (t.reshape(batch * groups, seq, width) for t in (key, value))
        out = query.new_empty(batch, seq, heads, width).transpose(1, 2)  # the layout the next projection reads
        saved = []
        for part, keys, diagonal in _blocks(seq, causal, _block(seq)):
            rows = query[:, :, part].reshape(batch * groups, -1, width)  # [batch * groups, heads per group * block, d]
            probabilities = torch.bmm(rows, _first(key, keys).transpose(1, 2))
            seen = None if mask is None else mask[:, :, part if mask.shape[2] > 1 else slice(None), :keys]
            _softmax_(probabilities.view(batch, heads, -1, keys), seen, diagonal, scale)
            kept = None
            dropped = probabilities
            if dropout_p > 0.0:
                dropped, kept = torch.native_dropout(probabilities, dropout_p, True)
            out[:, :, part] = torch.bmm(dropped, _first(value, keys)).view(batch, heads, -1, width)
            saved += [rows, probabilities, kept]
        ctx.save_for_backward(key, value, *saved)
        ctx.shape, ctx.causal, ctx.scale, ctx.dropout_p = query.shape, causal, scale, dropout_p
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        batch, heads, seq, width = ctx.shape
        key, value, *saved = ctx.saved_tensors
        blocks = _blocks(seq, ctx.causal, _block(seq))
        grad_query = key.new_empty(batch, heads, seq, width)
        # Key gradients of several blocks are summed in fp32 or wider and rounded once.
        wide = torch.promote_types(key.dtype, torch.float32)
        grad_key, grad_value = (torch.zeros_like(key, dtype=wide) for _ in range(2))
        for index, (part, keys, _) in enumerate(blocks):
            query, probabilities, kept = saved[3 * index : 3 * index + 3]
            upstream = grad[:, :, part].reshape(len(key), -1, width)
            dropped = probabilities
            grad_scores = torch.bmm(upstream, _first(value, keys).transpose(1, 2))
            if kept is not None:
                factor = kept.to(probabilities.dtype) * (1.0 / (1.0 - ctx.dropout_p) if ctx.dropout_p < 1.0 else 0.0)
                dropped, grad_scores = probabilities * factor, grad_scores * factor
            grad_value[:, :keys] += torch.bmm(dropped.transpose(1, 2), upstream)
            _softmax_backward_(grad_scores, probabilities, ctx.scale)
            grad_query[:, :, part] = torch.bmm(grad_scores, _first(key, keys)).view(batch, heads, -1, width)
            grad_key[:, :keys] += torch.bmm(grad_scores.transpose(1, 2), query)
        groups = (batch, len(key) // batch, seq, width)
        return grad_query, *(t.to(key.dtype).view(groups) for t in (grad_key, grad_value)), *(None,) * 4


def _first(tensor: Tensor, keys: int) -> Tensor:
    """Slices [many, seq, d] to a contiguous [many, keys, d]; products copy other layouts more slowly."""
    return tensor[:, :keys].contiguous()
