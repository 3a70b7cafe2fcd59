"""The operations through PyTorch's own fused functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from megatron.ops import ref
from megatron.ops.sdpa_order import preferred


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps).to(x.dtype)


def gelu(x: Tensor, tanh: bool) -> Tensor:
    return F.gelu(x, approximate="tanh" if tanh else "none")


def bias_gelu(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    return gelu((x + bias).to(x.dtype), tanh)


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)  # [..., ffn] each
    return F.silu(gate) * up


def geglu(x: Tensor, tanh: bool) -> Tensor:
    gate, up = x.chunk(2, dim=-1)  # [..., ffn] each
    return gelu(gate, tanh) * up


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float = 0.0,
    layer_scaling: int = 1,
    order: Sequence[SDPBackend] = (),
) -> Tensor:
    """`ref.attention` through F.scaled_dot_product_attention, whose scores stay in fp32: no layer scaling needed.
    `order`: of the kernels that are tried, if not PyTorch's."""
    if causal and (mask is not None or query.shape[-2] != key.shape[-2]):
        triangle = ref.causal_mask(query.shape[-2], key.shape[-2], query.device)
        mask, causal = triangle if mask is None else mask & triangle, False
    with preferred(order):
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout_p,
            is_causal=causal,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(ref.widened(logits), labels, reduction="none")
