"""Every operation as its plain formula: the fallback everywhere, and the oracle of every faster implementation.

Half-precision inputs are widened to fp32 inside; results come back in the dtype of the input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    wide = widened(x)  # [..., hidden]
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    scaled = normed * weight
    return (scaled if bias is None else scaled + bias).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = widened(x)  # [..., hidden]
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed.to(x.dtype) * weight).to(x.dtype)  # rounded before the gain, as transformers does


def of_sum(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """(norm(x + residual, *parameters), x + residual), as a function of x, residual and the norm's parameters."""

    def add_norm(x: Tensor, residual: Tensor, *parameters: Any) -> tuple[Tensor, Tensor]:
        total = residual + x
        return norm(total, *parameters), total

    return add_norm


def gelu(x: Tensor, tanh: bool) -> Tensor:
    wide = widened(x)
    if tanh:
        inner = math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide.pow(3))
        return (0.5 * wide * (1.0 + torch.tanh(inner))).to(x.dtype)
    return (0.5 * wide * (1.0 + torch.erf(wide / math.sqrt(2.0)))).to(x.dtype)


def bias_gelu(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    return gelu((x + bias).to(x.dtype), tanh)


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)  # [..., ffn] each
    return (widened(gate) * torch.sigmoid(widened(gate))).to(x.dtype) * up


def geglu(x: Tensor, tanh: bool) -> Tensor:
    gate, up = x.chunk(2, dim=-1)  # [..., ffn] each
    return gelu(gate, tanh) * up


def squared_relu(x: Tensor) -> Tensor:
    return torch.relu(x).square()


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 * cos.shape[-1] channels of every head, halves paired (Hugging Face's convention).

    x [batch, seq, heads, head_dim]; cos and sin [batch or 1, seq, 1, rotated / 2], in the dtype of x.
    """
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]), dim=-1)
    return turned.to(x.dtype)  # angles may be wider


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, dropout: Callable[[Tensor], Tensor]) -> Tensor:
    return residual + dropout(x if bias is None else x + bias)


def softmax(scores: Tensor, mask: Tensor | None, scale: float, causal: bool = False) -> Tensor:
    """Softmax of scale * scores over the positions where `mask` is true; scores [..., queries, keys].

    `causal` hides what `causal_mask` hides besides.
    """
    wide = widened(scores) * scale
    if causal:
        wide = wide.masked_fill(~causal_mask(scores.shape[-2], scores.shape[-1], scores.device), float("-inf"))
    if mask is not None:
        wide = wide.masked_fill(~mask, float("-inf"))
    return torch.softmax(wide, dim=-1).to(scores.dtype)


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """[queries, keys], true where a query may look; the last query sees every key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


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
    softmax_op: Callable[[Tensor, Tensor | None, float, bool], Tensor] = softmax,
) -> Tensor:
    """query [batch, heads, queries, d], key and value [batch, groups, keys, d] -> [batch, heads, queries, d].

    `mask` (true = may look) broadcasts to [batch, heads, queries, keys]. `layer_scaling` divides the scores before
    they are rounded to the working dtype and multiplies them back in fp32: the same function, a wider fp16 range.
    """
    repeat = query.shape[1] // key.shape[1]
    if repeat > 1:
        key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
    scores = (query * (scale / layer_scaling)) @ key.transpose(-1, -2)  # [batch, heads, queries, keys]
    probabilities = softmax_op(scores, mask, float(layer_scaling), causal)
    return torch.dropout(probabilities, dropout_p, dropout_p > 0.0) @ value


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Loss of every token: logits [tokens, vocabulary], labels [tokens] -> [tokens]."""
    wide = widened(logits)
    return torch.logsumexp(wide, dim=-1) - wide.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    """Loss of every token under logits = hidden @ weight.T, padded rows of `weight` left out.

    hidden [tokens, hidden], weight [padded vocabulary, hidden], labels [tokens] -> [tokens] in fp32 (or fp64).
    """
    return cross_entropy(hidden @ weight[:vocab_size].t(), labels)
