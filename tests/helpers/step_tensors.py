"""Tensors of a step for tests: whole, or in an optimizer's own memory, as a load returns them that reads into it."""

from __future__ import annotations

from torch import Tensor

from megatron.checkpoint.reader import StepReader
from megatron.optimizer import Optimizer


def read_into(optimizer: Optimizer, state: dict[str, dict[str, Tensor]]) -> int:
    """Fills the tensors that the optimizer lets be filled, and puts them into `state`; returns their number."""
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
