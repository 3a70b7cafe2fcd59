"""Pipeline stages of a user's own nn.Sequential."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from megatron.config.stages import split_layers
from megatron.distributed.state import Axis


class SequentialStage(nn.Module):
    """A run of an nn.Sequential's layers, under their own numbers; its input is the stage's before if there is one."""

    def __init__(self, model: nn.Sequential, layers: range) -> None:
        super().__init__()
        for number in layers:
            self.add_module(str(number), model[number])

    def forward(self, x: Tensor, *, hidden: Tensor | None = None) -> Tensor:
        y = x if hidden is None else hidden
        for layer in self.children():
            y = layer(y)
        return y


def cut_sequential(model: nn.Sequential, pp: Axis, *, layers_per_chunk: int | None = None) -> list[SequentialStage]:
    """This rank's stages, in the order of the model. All layers between stages must pass on one shape."""
    layers = split_layers(len(model), pp.size, layers_per_chunk=layers_per_chunk)
    return [SequentialStage(model, run) for run in layers.of_rank(pp.rank)]


def sequential_step(stage: nn.Module, batch: Mapping[str, Any], hidden: Tensor | None) -> Tensor:
    """`Pipeline`'s hidden step for batches whose input is called "x"."""
    return stage(batch["x"], hidden=hidden)
