"""The dtype that formulas compute in."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """Half precision as fp32; other dtypes as they are."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
