"""Initial values, drawn by (seed, parameter name) over the logical shape: every layout starts as the same model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.model.gpt import GPT
from megatron.model.parameters import Parameter, Uniform


def generator(name: str, seed: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def draw(name: str, logical_shape: Sequence[int], std: float, seed: int) -> Tensor:
    """Normal values with standard deviation `std`, fp32 on the CPU."""
    values = torch.empty(tuple(logical_shape), dtype=torch.float32, device="cpu")
    return values.normal_(0.0, 1.0, generator=generator(name, seed)).mul_(std)


def initial_value(parameter: Parameter, seed: int) -> Tensor:
    """The logical view of the whole parameter, in fp32 on the CPU."""
    name, shape, start = parameter.name, parameter.row.shape, parameter.row.start
    if isinstance(start, float):
        return torch.full(shape, start, dtype=torch.float32, device="cpu")
    if isinstance(start, Uniform):
        values = torch.empty(shape, dtype=torch.float32, device="cpu")
        return values.uniform_(-start.bound, start.bound, generator=generator(name, seed))
    return draw(name, shape, start.std, seed)


@torch.no_grad()
def initialise(model: GPT, seed: int) -> None:
    """Set every parameter of an unsplit GPT. Padded vocabulary rows are zero: they have no meaning."""
    table = model.table()
    for name, stored in model.named_parameters():
        value = initial_value(table[name], seed).view(table[name].row.stored_shape)
        stored.zero_()
        stored[: len(value)].copy_(value)
