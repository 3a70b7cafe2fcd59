"""Numbers that a training step reports besides its loss. They are reduced together, and copied to the host with the
loss."""

from typing import Literal

import torch
from torch import Tensor

from megatron.distributed.collectives import all_reduce
from megatron.distributed.parallel_state import Axis

Reduce = Literal["same", "sum", "mean", "max"]
"""Reduction over all ranks; "same": the values are already equal."""


class StepReports:
    """Numbers of one step. Every rank reports the same names, in the same order."""

    def __init__(self, world: Axis) -> None:
        self._world = world
        self._values: dict[str, tuple[Tensor, Reduce]] = {}

    def report(self, name: str, value: Tensor, reduce: Reduce = "same") -> None:
        """Reports a number of this step. It appears under its name in the log, in metrics files and in TensorBoard. Its
        format is in `NUMBERS` (training/metrics.py), or the default."""
        assert name not in self._values, f"{name} is reported twice"
        self._values[name] = value.detach().double(), reduce

    def clear(self) -> None:
        """Drops reported numbers, before a step or before the recomputation of one."""
        self._values = {}

    def take(self) -> dict[str, Tensor]:
        """Returns the reduced numbers of this step, by name, and clears them. A collective, unless all are "same"."""
        values, self._values = self._values, {}
        found = {name: value for name, (value, _) in values.items()}
        summed = [name for name, (_, reduce) in values.items() if reduce in ("sum", "mean")]
        if summed:
            found |= zip(summed, all_reduce(torch.stack([found[name] for name in summed]), self._world), strict=True)
        largest = [name for name, (_, reduce) in values.items() if reduce == "max"]
        if largest:
            stacked = torch.stack([found[name] for name in largest])
            found |= zip(largest, all_reduce(stacked, self._world, "max"), strict=True)
        for name, (_, reduce) in values.items():
            if reduce == "mean":
                found[name] = found[name] / self._world.size
        return found
