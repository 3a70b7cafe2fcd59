"""Whether a step is made, and what its gradients are multiplied by: numbers on the device, so that no host waits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_CLIP_EPSILON = 1e-6  # as in torch and Megatron: the clipped norm is a hair below the limit


@dataclass(frozen=True)
class Decision:
    """Zero-dimensional tensors, of double precision where the device has it."""

    norm: Tensor
    """Global L2 norm of the true gradient, before clipping."""
    applied: Tensor
    """1, or 0 where a number is not finite: then nothing is touched."""
    clipped: Tensor
    factor: Tensor
    """What the gradients in the buffers are multiplied by: unscaling and clipping in one."""

    def report(self) -> Tensor:
        """For the host, when it asks: [norm, applied, clipped]."""
        return torch.stack([self.norm, self.applied, self.clipped])


def decide(raw_norm: Tensor, grad_scale: float | Tensor, clip_grad: float, finite: Tensor | None = None) -> Decision:
    """`raw_norm` is that of what the buffers hold: the true gradients times `grad_scale`. `finite`: what else must
    hold for the step to be made, such as a finite loss."""
    multiplier = torch.ones_like(raw_norm) / grad_scale
    norm = raw_norm * multiplier.abs()
    applied = torch.isfinite(norm)
    if finite is not None:
        applied = applied & finite
    clipped = applied & (norm + _CLIP_EPSILON > clip_grad) if clip_grad > 0.0 else torch.zeros_like(applied)
    factor = torch.where(clipped, multiplier * (clip_grad / (norm + _CLIP_EPSILON)), multiplier)
    # What is in the buffers stays as it is where it is looked at later: to find the bad gradient.
    factor = torch.where(applied, factor, torch.ones_like(factor))
    return Decision(norm, applied.to(norm.dtype), clipped.to(norm.dtype), factor)
