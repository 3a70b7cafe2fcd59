"""Decides on the device whether the update is made and how gradients are scaled, without a host sync."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_CLIP_EPSILON = 1e-6  # as in torch and Megatron: the clipped norm is a hair below the limit


@dataclass(frozen=True)
class Decision:
    """The decision as zero-dimensional tensors, in double precision where the device has it."""

    norm: Tensor
    """Global L2 norm of the true gradient, before clipping."""
    applied: Tensor
    """1, or 0 if a number is not finite: then no weight is changed."""
    clipped: Tensor
    factor: Tensor
    """The factor on the gradients in the buffers: unscaling and clipping in one."""

    def on_host(self) -> "Decision":
        """The decision on the host. A host sync."""
        return Decision(*torch.stack([self.norm, self.applied, self.clipped, self.factor]).cpu().unbind())

    def report(self) -> Tensor:
        """[norm, applied, clipped], for the host."""
        return torch.stack([self.norm, self.applied, self.clipped])


@dataclass(frozen=True)
class HostDecision:
    """The same numbers on the host, for updates that are made from there."""

    norm: float
    applied: bool
    clipped: bool
    factor: float

    def report(self) -> tuple[float, float, float]:
        return self.norm, float(self.applied), float(self.clipped)


def decide_on_host(raw_norm: float, grad_scale: float, clip_grad: float) -> HostDecision:
    """`decide`, in the same double precision."""
    multiplier = 1.0 / grad_scale
    norm = raw_norm * abs(multiplier)
    if not math.isfinite(norm):
        return HostDecision(norm, False, False, 1.0)
    clipped = clip_grad > 0.0 and norm + _CLIP_EPSILON > clip_grad
    return HostDecision(
        norm, True, clipped, multiplier * (clip_grad / (norm + _CLIP_EPSILON)) if clipped else multiplier
    )


def decide(raw_norm: Tensor, grad_scale: float | Tensor, clip_grad: float, finite: Tensor | None = None) -> Decision:
    """`raw_norm` is the norm of the buffers, which hold the true gradients times `grad_scale`. `finite`: a further
    condition for the update, such as a finite loss."""
    multiplier = torch.ones_like(raw_norm) / grad_scale
    norm = raw_norm * multiplier.abs()
    applied = torch.isfinite(norm)
    if finite is not None:
        applied = applied & finite
    clipped = applied & (norm + _CLIP_EPSILON > clip_grad) if clip_grad > 0.0 else torch.zeros_like(applied)
    factor = torch.where(clipped, multiplier * (clip_grad / (norm + _CLIP_EPSILON)), multiplier)
    # Without an update the buffers stay as they are, so that the non-finite gradient can be found.
    factor = torch.where(applied, factor, torch.ones_like(factor))
    return Decision(norm, applied.to(norm.dtype), clipped.to(norm.dtype), factor)
