"""PyTorch's own attention, and the order of its kernels on CUDA."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.ops.softmax import causal_mask
from megatron.utils.dtype import HALF

# Published measurements on H100, head width 128, forward only: cuDNN about 600 TFLOP/s, flash 370. If a kernel does not
# support a call (its mask, dropout, grouped keys or head width), PyTorch uses the next one.
_OTHERS = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
CUDNN_FIRST = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, *_OTHERS)
FLASH_FIRST = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, *_OTHERS)
WITHOUT_CUDNN = (SDPBackend.FLASH_ATTENTION, *_OTHERS)
# cuDNN before 9.15.1 accesses memory out of bounds in the backward pass (pytorch #169849). On the generation after
# Hopper, that and newer versions give wrong results with few groups of keys (pytorch #193893). PyTorch itself does not
# use cuDNN's attention in builds for older CUDA (pytorch #171627).
_CUDNN_SINCE, _HOPPER, _CUDA_SINCE = 91501, 9, (12, 9)


@cache
def trusts_cudnn() -> bool:
    """True if cuDNN's attention is known to be correct on this machine's GPU."""
    version = torch.backends.cudnn.version()
    if version is None or version < _CUDNN_SINCE or not torch.cuda.is_available():
        return False
    if torch.version.cuda is None or tuple(map(int, torch.version.cuda.split(".")[:2])) < _CUDA_SINCE:
        return False
    return torch.cuda.get_device_capability()[0] == _HOPPER


def order(*, flash_first: bool = False) -> tuple[SDPBackend, ...]:
    if not trusts_cudnn():
        return WITHOUT_CUDNN
    return FLASH_FIRST if flash_first else CUDNN_FIRST


def explanation(*, flash_first: bool = False) -> str:
    names = [backend.name.removesuffix("_ATTENTION").lower() for backend in order(flash_first=flash_first)[:2]]
    why = "" if trusts_cudnn() else " (this cuDNN's attention is not known to be correct on this GPU)"
    return f"{' before '.join(names)}{why}"


def preferred(backends: Sequence[SDPBackend]) -> AbstractContextManager[Any]:
    """Context that sets the kernel order of scaled_dot_product_attention; empty keeps PyTorch's order. torch.compile
    reads this order while tracing, so compiled code uses the same kernel."""
    return sdpa_kernel(list(backends), set_priority=True) if backends else nullcontext()


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
    backends: Sequence[SDPBackend] = (),
) -> Tensor:
    """Attention through F.scaled_dot_product_attention. Its scores stay in fp32, so layer scaling is not needed.
    `backends`: kernels to try, in this order. Empty keeps PyTorch's order. cuDNN gets no call with a mask, because its
    gradients are NaN with some masks (pytorch #196678)."""
    if causal and (mask is not None or query.shape[-2] != key.shape[-2]):
        triangle = causal_mask(query.shape[-2], key.shape[-2], query.device)
        mask, causal = triangle if mask is None else mask & triangle, False
    repeat = query.shape[1] // key.shape[1]
    if repeat > 1 and query.device.type == "cuda" and not _takes_groups(query, mask):
        key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
    if repeat > 1 and query.device.type == "cpu" and not causal and _is_step(query, mask):
        # Heads that share a key become queries of one head, because PyTorch's CPU kernels would repeat the keys.
        rows = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])  # [batch, groups, heads of a group, d]
        found = sdpa(rows, key, value, mask=mask, causal=False, scale=scale, dropout_p=dropout_p, backends=backends)
        return found.reshape(query.shape)
    if mask is not None:
        backends = [backend for backend in backends if backend != SDPBackend.CUDNN_ATTENTION]
    with preferred(backends):
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


def _takes_groups(query: Tensor, mask: Tensor | None) -> bool:
    """True if a fused CUDA kernel certainly takes keys that several heads share: flash, in half precision, unmasked.
    The memory-efficient kernel does not; PyTorch would compute all scores [batch, heads, queries, keys] instead."""
    return mask is None and query.dtype in HALF


def _is_step(query: Tensor, mask: Tensor | None) -> bool:
    """True for a step of generation: one query per head, and a mask that all heads share."""
    return query.shape[2] == 1 and (mask is None or (mask.dim() == 4 and mask.shape[1] == 1))
