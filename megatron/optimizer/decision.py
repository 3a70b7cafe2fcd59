"""Decides on the device whether to apply the update and how to scale gradients, without a host sync."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_CLIP_EPSILON = 1e-6  # as in torch and Megatron: the clipped norm is slightly below the limit


@dataclass(frozen=True)
class Decision:
    """Decision about an update, as zero-dimensional tensors, in double precision if the device has it."""

    norm: Tensor
    """Global L2 norm of the true gradient, before clipping."""
    applied: Tensor
    """1 if the update is applied; 0 if a number is not finite, and then no weight changes."""
    clipped: Tensor
    factor: Tensor
    """Factor on the gradients in the buffers: unscaling and clipping in one."""

    def on_host(self) -> "Decision":
        """Copies the decision to the host: a host sync."""
        return Decision(*torch.stack([self.norm, self.applied, self.clipped, self.factor]).cpu().unbind())

    def report(self) -> Tensor:
        """[norm, applied, clipped], for the host."""
        return torch.stack([self.norm, self.applied, self.clipped])


@dataclass(frozen=True)
class HostDecision:
    """Decision about an update, as Python numbers, for updates that the host makes."""

    norm: float
    applied: bool
    clipped: bool
    factor: float

    def report(self) -> tuple[float, float, float]:
        return self.norm, float(self.applied), float(self.clipped)


def decide_on_host(raw_norm: float, grad_scale: float, clip_grad: float) -> HostDecision:
    """Does what `decide` does, in the same double precision."""
    multiplier = 1.0 / grad_scale
    norm = raw_norm * abs(multiplier)
    if not math.isfinite(norm):
        return HostDecision(norm, False, False, 1.0)
    clipped = clip_grad > 0.0 and norm + _CLIP_EPSILON > clip_grad
    return HostDecision(
        norm, True, clipped, multiplier * (clip_grad / (norm + _CLIP_EPSILON)) if clipped else multiplier
    )


def decide(raw_norm: Tensor, grad_scale: float | Tensor, clip_grad: float, finite: Tensor | None = None) -> Decision:
    """Decides from `raw_norm`, the norm of buffers that hold the true gradients times `grad_scale`. `finite`: another
    condition for the update, such as a finite loss."""
    multiplier = torch.ones_like(raw_norm) / grad_scale
    norm = raw_norm * multiplier.abs()
    applied = torch.isfinite(norm)
    if finite is not None:
        applied = applied & finite
    clipped = applied & (norm + _CLIP_EPSILON > clip_grad) if clip_grad > 0.0 else torch.zeros_like(applied)
    factor = torch.where(clipped, multiplier * (clip_grad / (norm + _CLIP_EPSILON)), multiplier)
    # A skipped step leaves the buffers unchanged, so that the non-finite gradient can be found.
    factor = torch.where(applied, factor, torch.ones_like(factor))
    return Decision(norm, applied.to(norm.dtype), clipped.to(norm.dtype), factor)
