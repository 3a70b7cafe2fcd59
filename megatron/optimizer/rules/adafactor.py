"""Adafactor: of the second moment of a matrix only the means of its rows and columns stay (Shazeer and Stern, 2018).

Rows, columns, and the sizes of an update and of a weight are those of the whole parameter, however it is split or
divided: each rank adds up its piece, and two small sums over the ranks make the same numbers on all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from megatron.optimizer.extent import Extent, sums_over
from megatron.optimizer.rules.base import COLUMNS, ROWS, Gated, LiveState, Slot


@dataclass(frozen=True)
class Settings:
    beta1: float
    """Of a mean of updates; 0 keeps none."""
    decay_rate: float
    """The second moment of update t is mixed with t ** decay_rate of the new squares."""
    clip_threshold: float
    """Largest root mean square of an update, before its rate."""
    eps1: float
    """Added to squared gradients."""
    eps2: float
    """Smallest root mean square that a parameter is taken to have."""
    scale_parameter: bool
    """Whether the rate is relative to that of the parameter."""
    relative_step: bool
    """Whether the rate of update t is at most 1 / sqrt(t)."""


@dataclass(frozen=True)
class _Job:
    """One slot in one update."""

    slot: Slot
    grad: Tensor
    extent: Extent
    mixed: Tensor
    """How much of this step is in the second moment."""
    open: float | Tensor

    @property
    def sums(self) -> Iterator[Tensor]:
        """The parts of sums over the whole parameter that the second moment is made of."""
        if self.extent.is_matrix:
            yield from self.extent.row_and_column_sums(self.grad)

    def mix(self, sums: Sequence[Tensor], eps: float) -> list[Tensor]:
        """Updates the second moment. What it returns is the same, or what it would be in a step that is left out: there
        it may still be all zeros, which nothing can be divided by."""
        if self.extent.is_matrix:
            counts = [prod(side.logical_shape) for side in (self.extent.columns, self.extent.rows)]
            kept = [self.slot.state[ROWS], self.slot.state[COLUMNS]]
            new = [total / count + eps for total, count in zip(sums, counts, strict=True)]
        else:
            kept, new = [self.slot.state["exp_avg_sq"]], [self.grad.square() + eps]
        mixed = [old.lerp(one.to(old.dtype), self.mixed.to(old.dtype)) for old, one in zip(kept, new, strict=True)]
        for old, one in zip(kept, mixed, strict=True):
            old.add_((one - old) * self.open)
        return mixed

    def direction(self, moments: Sequence[Tensor]) -> Tensor:
        """The gradient over the root of its second moment."""
        if not self.extent.is_matrix:
            return self.grad * moments[0].rsqrt()
        rows, columns = moments
        sides = (self.extent.rows, (rows / rows.mean()).rsqrt()), (self.extent.columns, columns.rsqrt())
        row, column = (spec.take(side).reshape(-1) for spec, side in sides)
        found = torch.zeros_like(self.grad)  # rows that pad a vocabulary stay as they are
        for part in self.extent.rectangles():
            torch.mul(part.of(self.grad), row[part.rows, None], out=part.of(found)).mul_(column[part.columns])
        return found


@dataclass(frozen=True, eq=False)
class Adafactor(LiveState):
    settings: Settings
    extents: Mapping[str, Extent]
    """By name, of every parameter that it updates."""
    fused: bool = True

    def slot(self, name: str, tensor: Tensor) -> Slot:
        extent = self.extents[name]
        state = {"exp_avg_sq": torch.zeros_like(tensor, requires_grad=False)}
        if extent.is_matrix:
            sides = {ROWS: extent.rows, COLUMNS: extent.columns}
            state = {kind: tensor.new_zeros(prod(side.logical_shape)) for kind, side in sides.items()}
        if self.settings.beta1:
            state["exp_avg"] = torch.zeros_like(tensor, requires_grad=False)
        return Slot(name, tensor, state, torch.zeros((), dtype=torch.float32, device=tensor.device))

    def update(
        self, slots: Sequence[Slot], grads: list[Tensor], lr: float, weight_decay: float, skip: Tensor | None = None
    ) -> None:
        settings, gated = self.settings, Gated.by(skip, grads)
        jobs = []
        for slot, grad in zip(slots, gated.grads, strict=True):
            slot.step += gated.open
            mixed = slot.step.double().clamp(min=1.0) ** settings.decay_rate
            jobs.append(_Job(slot, grad, self.extents[slot.name], mixed, gated.open))
        sizes, moments = self._second_moments(jobs)
        lengths = self._lengths(jobs, moments)
        for job, size, own, length in zip(jobs, sizes, moments, lengths, strict=True):
            slot, count = job.slot, job.extent.elements
            rate = self._rate(lr, slot.step, (size / count).sqrt())
            clip = ((length / count).sqrt() / settings.clip_threshold).clamp(min=1.0)
            move = job.direction(own).mul_((rate / clip).to(slot.tensor.dtype))
            if settings.beta1:
                mean = slot.state["exp_avg"]
                move = mean.lerp(move, 1.0 - settings.beta1)
                mean.add_((move - mean) * gated.open)
            slot.tensor.mul_(1.0 - lr * weight_decay * gated.open)
            slot.tensor.sub_(move.mul_(gated.open))

    def _second_moments(self, jobs: Sequence[_Job]) -> tuple[list[Tensor], list[list[Tensor]]]:
        """For each job the sum of the weight's squares, and what `mix` returns."""
        axes, parts, ends = [], [], [0]
        for job in jobs:
            own = [job.extent.square_sum(job.slot.tensor), *job.sums]
            axes += [job.extent.axes] * len(own)
            parts += own
            ends.append(len(parts))
        totals = sums_over(axes, parts)
        own_totals = [totals[start:stop] for start, stop in pairwise(ends)]
        sizes = [own[0] for own in own_totals]
        return sizes, [job.mix(own[1:], self.settings.eps1) for job, own in zip(jobs, own_totals, strict=True)]

    def _lengths(self, jobs: Sequence[_Job], moments: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """For each job the sum of its direction's squares. Directions are recomputed when they are used: keeping them
        would take as much memory as the gradients."""
        axes = [job.extent.axes for job in jobs]
        parts = (job.extent.square_sum(job.direction(own)) for job, own in zip(jobs, moments, strict=True))
        return sums_over(axes, parts)

    def _rate(self, lr: float, step: Tensor, size: Tensor) -> Tensor:
        """`size`: the root mean square of the parameter."""
        settings = self.settings
        rate = torch.full_like(size, lr)
        if settings.relative_step:
            rate = rate.clamp(max=step.to(size.dtype).clamp(min=1.0).rsqrt())
        return rate * size.clamp(min=settings.eps2) if settings.scale_parameter else rate
