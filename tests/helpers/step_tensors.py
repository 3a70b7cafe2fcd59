"""Tensors of a step for tests: whole, and as a load that reads into an optimizer's own memory hands them back."""

from __future__ import annotations

from torch import Tensor

from megatron.checkpoint.reader import StepReader
from megatron.optimizer import Optimizer


def read_into(optimizer: Optimizer, state: dict[str, dict[str, Tensor]]) -> int:
    """Fills what the optimizer lets be filled, and puts it in the place of what is in `state`; returns how much."""
    places = optimizer.loadable_in_place()
    for name, kinds in places.items():
        weight = optimizer.store.weight(name)
        for kind, tensor in kinds.items():
            assert tensor.data_ptr() != weight.data_ptr(), "the weights are loaded after it"
            tensor.copy_(state[name][kind])
            state[name][kind] = tensor
    return sum(map(len, places.values()))


def model_tensors(reader: StepReader) -> dict[str, Tensor]:
    return {name: reader.logical(name, record) for name, record in reader.manifest.model.items()}
