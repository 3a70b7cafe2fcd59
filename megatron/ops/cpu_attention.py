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
from megatron.ops.fused_qkv import Triple, empty_thirds, whole

# Up to these lengths it was measured to be so much faster that the memory is worth it (docs/performance.md).
MAX_KEYS, MAX_KEYS_HALF = 1024, 2048


class ScoresMath(Protocol):
    """What is done in place to scores [batch, heads, queries, keys], of which query i sees the keys up to i + diagonal
    that `mask` allows."""

    def softmax_(self, scores: Tensor, mask: Tensor | None, diagonal: int, scale: float) -> None:
        """scores become softmax(scale * scores)."""

    def softmax_backward_(self, grad: Tensor, probabilities: Tensor, diagonal: int, scale: float) -> None:
        """The gradient of the probabilities becomes that of the scores."""

    def gradients_(self, grads: Triple, parts: Triple, block: int, causal: bool) -> None:
        """`grads`, those of query, key and value [batch, heads or groups, seq, d], are put together from what each
        block of `block` queries brought, one behind the other: [batch * groups, rows, d], whose rows are the block's
        queries, or the keys that it sees: those up to its last query's (`causal`) or all. What keys receive from
        several blocks is added up in their order, in fp32 or wider."""


class TorchScores:
    """See `ScoresMath`."""

    def softmax_(self, scores: Tensor, mask: Tensor | None, diagonal: int, scale: float) -> None:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(diagonal)
        scores.copy_(ref.softmax(scores, visible if mask is None else mask & visible, scale))

    def softmax_backward_(self, grad: Tensor, probabilities: Tensor, diagonal: int, scale: float) -> None:
        grad.copy_(torch._softmax_backward_data(grad, probabilities, -1, grad.dtype)).mul_(scale)

    def gradients_(self, grads: Triple, parts: Triple, block: int, causal: bool) -> None:
        (batch, heads, seq, width), groups = grads[0].shape, grads[1].shape[1]
        blocks = _blocks(seq, causal, block)
        rows = [part.stop - part.start for part, _, _ in blocks]
        for (part, _, _), piece in zip(blocks, _pieces(parts[0], batch * heads, rows, width), strict=True):
            grads[0][:, :, part] = piece.view(batch, heads, -1, width)
        for grad, flat in zip(grads[1:], parts[1:], strict=True):
            total = torch.zeros_like(grad, dtype=torch.promote_types(grad.dtype, torch.float32))
            for piece in _pieces(flat, batch * groups, [keys for _, keys, _ in blocks], width):
                total[:, :, : piece.shape[1]] += piece.view(batch, groups, -1, width)
            grad.copy_(total)


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


def _blocks(seq: int, causal: bool, block: int) -> list[tuple[slice, int, int]]:
    """(queries, keys that they see together, diagonal): without `causal` a mask decides, so all keys."""
    blocks = [slice(start, min(start + block, seq)) for start in range(0, seq, block)]
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
        ctx.thirds = whole((query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))) is not None
        key, value = (t.reshape(batch * groups, seq, width) for t in (key, value))
        out = query.new_empty(batch, seq, heads, width).transpose(1, 2)  # the layout the next projection reads
        saved = []
        for part, keys, diagonal in _blocks(seq, causal, _block(seq)):
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
        blocks, per_group = _blocks(seq, ctx.causal, _block(seq)), batch * heads // len(key)
        rows = [per_group * (part.stop - part.start) for part, _, _ in blocks], *2 * ([keys for _, keys, _ in blocks],)
        parts = tuple(key.new_empty(len(key) * sum(each) * width) for each in rows)
        pieces = [_pieces(flat, len(key), each, width) for flat, each in zip(parts, rows, strict=True)]
        for index, (part, keys, diagonal) in enumerate(blocks):
            query, probabilities, kept = saved[3 * index : 3 * index + 3]
            upstream = grad[:, :, part].reshape(len(key), -1, width)
            dropped = probabilities
            grad_scores = torch.bmm(upstream, _first(value, keys).transpose(1, 2))
            if kept is not None:
                factor = kept.to(probabilities.dtype) * (1.0 / (1.0 - ctx.dropout_p) if ctx.dropout_p < 1.0 else 0.0)
                dropped, grad_scores = probabilities * factor, grad_scores * factor
            torch.bmm(dropped.transpose(1, 2), upstream, out=pieces[2][index])
            four = (batch, heads, -1, keys)
            ctx.math.softmax_backward_(grad_scores.view(four), probabilities.view(four), diagonal, ctx.scale)
            torch.bmm(grad_scores, _first(key, keys), out=pieces[0][index])
            torch.bmm(grad_scores.transpose(1, 2), query, out=pieces[1][index])
        like = grad.transpose(1, 2)
        apart = empty_thirds(like) if ctx.thirds else _empty(like, len(key) // batch)
        grads = apart[0].transpose(1, 2), apart[1].transpose(1, 2), apart[2].transpose(1, 2)
        ctx.math.gradients_(grads, parts, _block(seq), ctx.causal)
        return *grads, *(None,) * 5


def _empty(like: Tensor, groups: int) -> Triple:
    """For the gradients, where they were not cut from one tensor: [batch, seq, heads or groups, d]."""
    key = like.new_empty(*like.shape[:2], groups, like.shape[3])
    return like.new_empty(like.shape), key, torch.empty_like(key)


def _pieces(parts: Tensor, heads: int, rows: list[int], width: int) -> list[Tensor]:
    """What each block brought: [heads, its rows, d]."""
    flat = parts.split([heads * count * width for count in rows])
    return [piece.view(heads, count, width) for piece, count in zip(flat, rows, strict=True)]


def _first(tensor: Tensor, keys: int) -> Tensor:
    """[many, seq, d] -> [many, keys, d], side by side: products would copy any other layout, and slower."""
    return tensor[:, :keys].contiguous()
