"""Muon: a matrix moves along its momentum, orthogonalised (Jordan et al., 2024).

The momentum is elementwise, so it lives where the weights do, in whatever pieces. Its orthogonalisation needs whole
matrices, and `Directions` brings them together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron.optimizer.rules.base import Gated, LiveState, Slot


class Directions(Protocol):
    def __call__(self, momenta: Mapping[str, Tensor], /) -> dict[str, Tensor]:
        """The updates that follow from the momenta of all matrices, in the same pieces. A collective."""
        ...


@dataclass(frozen=True)
class Muon(LiveState):
    momentum: float
    nesterov: bool
    directions: Directions
    fused: bool = True

    def slot(self, name: str, tensor: Tensor) -> Slot:
        return Slot(name, tensor, {"momentum_buffer": torch.zeros_like(tensor, requires_grad=False)}, torch.zeros(()))

    def update(
        self, slots: Sequence[Slot], grads: list[Tensor], lr: float, weight_decay: float, skip: Tensor | None = None
    ) -> None:
        gated = Gated.by(skip, grads)
        momenta = {}
        for slot, grad in zip(slots, gated.grads, strict=True):
            momentum = slot.state["momentum_buffer"]
            momentum.lerp_(grad, (1.0 - self.momentum) * gated.open)
            momenta[slot.name] = grad.lerp(momentum, self.momentum) if self.nesterov else momentum
        directions = self.directions(momenta)
        for slot in slots:
            slot.tensor.mul_(1.0 - lr * weight_decay * gated.open)
            slot.tensor.sub_(directions[slot.name] * (lr * gated.open))


def scale_factor(mode: str, rows: int, columns: int) -> float:
    """Makes updates of matrices of all shapes equally large in some norm; the modes are Megatron's."""
    if mode == "spectral":
        return math.sqrt(max(rows, columns))
    if mode == "shape_scaling":
        return math.sqrt(max(1.0, rows / columns))
    assert mode == "unit_rms_norm", mode
    return math.sqrt(rows / columns)
