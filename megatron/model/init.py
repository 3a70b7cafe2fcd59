"""Initial values, drawn by (seed, parameter name, index), so every layout starts with the same model."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from megatron.model.gpt import GPT
from megatron.model.parameters import Parameter, Uniform
from megatron.model.random_values import Run, normal_values, uniform_values


def initial_value(parameter: Parameter, seed: int) -> Tensor:
    """Returns the initial values of the whole parameter in its logical view, in fp32 on the CPU."""
    shape = parameter.row.shape
    return initial_elements(parameter, [(0, prod(shape))], seed).view(shape)


def initial_elements(parameter: Parameter, runs: Sequence[Run], seed: int) -> Tensor:
    """Returns the initial elements of these runs of the logical view, concatenated, in fp32 on the CPU."""
    start = parameter.row.start
    if isinstance(start, float):
        count = sum(count for _, count in runs)
        return torch.full((count,), start, dtype=torch.float32, device="cpu")
    if isinstance(start, Uniform):
        return uniform_values(seed, parameter.name, runs, start.bound)
    return normal_values(seed, parameter.name, runs, start.std)


@torch.no_grad()
def initialise(model: GPT, seed: int) -> None:
    """Sets every parameter of an unsplit GPT. Padding rows of the vocabulary are zero."""
    table = model.table()
    for name, stored in model.named_parameters():
        value = initial_value(table[name], seed).view(table[name].row.stored_shape)
        stored.zero_()
        stored[: len(value)].copy_(value)
