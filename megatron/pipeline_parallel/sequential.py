"""Splits a user's own nn.Sequential into pipeline stages."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from megatron.config.stages import split_layers
from megatron.distributed.parallel_state import Axis


class SequentialStage(nn.Module):
    """Consecutive layers of an nn.Sequential, with their original numbers. If `hidden` is given, it is the previous
    stage's output and replaces the input `x`."""

    def __init__(self, model: nn.Sequential, layers: range) -> None:
        super().__init__()
        for number in layers:
            self.add_module(str(number), model[number])

    def forward(self, x: Tensor, *, hidden: Tensor | None = None) -> Tensor:
        y = x if hidden is None else hidden
        for layer in self.children():
            y = layer(y)
        return y


def cut_sequential(model: nn.Sequential, pp: Axis) -> list[SequentialStage]:
    """Cuts out this rank's stages, in the order of the model. All tensors between stages must have the same shape."""
    layers = split_layers(len(model), pp.size)
    return [SequentialStage(model, run) for run in layers.of_rank(pp.rank)]


def sequential_step(stage: nn.Module, batch: Mapping[str, Any], hidden: Tensor | None) -> Tensor:
    """Implements `HiddenStep` for batches whose input is called "x"."""
    return stage(batch["x"], hidden=hidden)
