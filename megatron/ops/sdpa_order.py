"""Which of PyTorch's attention kernels is tried first on CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# By published measurements on H100, head width 128, forward only: cuDNN near 600 TFLOP/s, flash 370. What one cannot
# do (a mask, dropout, grouped keys, a width) falls to the next.
ORDER = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
FLASH_FIRST = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, *ORDER[2:])


def preferred(device_type: str, order: Sequence[SDPBackend] = ORDER) -> AbstractContextManager[Any]:
    """Around a call of scaled_dot_product_attention. A compiler would stop at the change of a setting."""
    if device_type != "cuda" or torch.compiler.is_compiling():
        return nullcontext()
    return sdpa_kernel(list(order), set_priority=True)
