"""Models of other programs, their data, and the plain torch loop that trains them: the oracle of the engine's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 5


class Tiny(nn.Module):
    """A convolution, a tied pair, a frozen layer, an unused parameter, a scalar, a buffer, and a matrix stored by
    columns, as in channels_last models."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4) if norm else nn.GroupNorm(2, 4)
        self.one, self.two = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.two.weight = self.one.weight
        self.fixed = nn.Linear(64, 64).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("offset", torch.linspace(-1, 1, 64))
        self.out = nn.Linear(64, CLASSES)
        self.out.weight = nn.Parameter(self.out.weight.detach().t().contiguous().t())

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.max_pool2d(torch.tanh(self.norm(self.conv(images))), 2).flatten(1)
        hidden = torch.tanh(self.one(hidden)) + self.fixed(hidden) + self.offset
        return self.out(self.scale * self.two(hidden))


def make_model(dtype: torch.dtype = torch.float64, norm: bool = False, no_scalar: bool = False) -> Tiny:
    """`no_scalar`: leaves out the scalar parameter, which ZeRO 2 and 3 do not accept."""
    torch.manual_seed(0)
    model = Tiny(norm).to(dtype)
    if no_scalar:
        model.scale = nn.Parameter(torch.ones(1, dtype=dtype))
    return model


def batch_of(step: int, samples: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 + step)
    return torch.randn(samples, 1, 8, 8, generator=draw, dtype=dtype), torch.randint(
        CLASSES, (samples,), generator=draw
    )


def plain_loop(
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    steps: int,
    samples: int,
    clip: float = 0.0,
    no_scalar: bool = False,
) -> dict[str, Tensor]:
    """Trains in one process on the whole batch at once."""
    model = make_model(no_scalar=no_scalar)
    optimizer = make_optimizer(model)
    for step in range(steps):
        images, labels = batch_of(step, samples)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return weights_of(model)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def largest_difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max((found[name].double() - wanted[name].double()).abs().max().item() for name in wanted)
