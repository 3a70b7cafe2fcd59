"""Moves a model's inputs to its device and, if asked, casts them."""

import copy
from typing import Any

import torch
from torch import Tensor


def moved(value: Any, device: torch.device, half: torch.dtype | None = None) -> Any:
    """Returns the same value with its tensors on `device`; floating-point ones are cast to `half` if it is given."""
    if isinstance(value, Tensor):
        dtype = half if half is not None and value.is_floating_point() else None
        if value.device == device and dtype in (None, value.dtype):
            return value
        return value.to(device, dtype, non_blocking=True)
    if isinstance(value, dict):
        found = copy.copy(value)  # of the same class, such as an output of transformers
        for key, item in value.items():
            found[key] = moved(item, device, half)
        return found
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(item, device, half) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(moved(item, device, half) for item in value)
    return value
