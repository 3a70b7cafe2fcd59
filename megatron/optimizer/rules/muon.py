"""Muon: a matrix moves along its orthogonalised momentum (Jordan et al., 2024).

The momentum is elementwise, so it is stored in the same pieces as the weights. Orthogonalisation needs whole matrices,
which `Directions` gathers. Each of its steps applies an odd polynomial a x + b x^3 + c x^5 to all singular values, with
matrix products only. The singular values approach 1, and the singular vectors do not change.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from megatron.optimizer.rules.base import Control, Gated, LiveState, Slot, Slots

_EPS = 1e-7
Coefficients = tuple[float, float, float]

COEFFICIENTS: Mapping[str, tuple[Coefficients, ...]] = MappingProxyType(
    {
        "simple": ((3.4445, -4.7750, 2.0315),),
        "quintic": (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        "polar_express": (
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
            (1.8750, -1.2500, 0.3750),
        ),
        "aol": (
            (4.0098, -7.0585, 2.4635),
            (3.4585, -5.5479, 2.5959),
            (2.7573, -3.2939, 1.4254),
            (2.7215, -3.0494, 1.3169),
        ),
    }
)
"""Published coefficients by Megatron's names: (a, b, c) of each step. Longer iterations repeat the set from its start;
polar_express repeats its last row."""


def steps_of(kind: str, number: int) -> list[Coefficients]:
    known = COEFFICIENTS[kind]
    if kind == "polar_express":
        return [known[min(step, len(known) - 1)] for step in range(number)]
    return [known[step % len(known)] for step in range(number)]


def orthogonalised(matrix: Tensor, steps: list[Coefficients], dtype: torch.dtype) -> Tensor:
    """Orthogonalises a matrix, in `dtype`, with the same operations as torch.optim.Muon."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(dtype, copy=True)
    if tall:
        x = x.T
    x.div_(x.norm().clamp(min=_EPS))  # no singular value exceeds the norm
    for a, b, c in steps:
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Directions(Protocol):
    def __call__(self, momenta: Mapping[str, Tensor], /) -> dict[str, Tensor]:
        """Computes updates from the momenta of all matrices, in the same pieces. A collective."""


@dataclass(frozen=True)
class Muon(LiveState):
    momentum: float
    nesterov: bool
    directions: Directions
    fused: bool = True

    def slot(self, name: str, tensor: Tensor) -> Slot:
        return Slot(name, tensor, {"momentum_buffer": torch.zeros_like(tensor, requires_grad=False)}, torch.zeros(()))

    def step(self, store: Slots, shards: Sequence[str], control: Control) -> None:
        (slots, grads), (lr, weight_decay, skip) = store.of(shards), control
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
    """Factor that makes updates of all matrix shapes equally large in some norm; the modes are Megatron's."""
    if mode == "spectral":
        return math.sqrt(max(rows, columns))
    if mode == "shape_scaling":
        return math.sqrt(max(1.0, rows / columns))
    assert mode == "unit_rms_norm", mode
    return math.sqrt(rows / columns)
