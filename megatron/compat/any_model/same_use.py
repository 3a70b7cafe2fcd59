"""Checks that all ranks use the same layers, because they gather a layer together (ZeRO 2 and 3).

If ranks gather different layers of the same size, each gets parts of both, and wrong sums of gradients, without any
error. Each parameter therefore has a number that records which passes used it, and ranks compare these numbers once per
step.

If the layers have different sizes, gloo ends the process when the message arrives. Ranks that use different layers
usually do so from the first step on. In the first step they therefore compare before every gather; later they do not,
because each comparison costs a message.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron.distributed import collectives
from megatron.distributed.parallel_state import Axis
from megatron.errors import ConfigError

_PASSES = 16
"""Number of bits that record the passes of a step; with more passes, several passes share a bit."""
_WAY_OUT = (
    "at stages 2 and 3 of ZeRO all ranks gather a layer together; use the same layers on all ranks, or "
    "zero_optimization.stage 1"
)


class SameUse:
    def __init__(self, model: nn.Module, units: Iterable[nn.Module], axis: Axis, device: torch.device) -> None:
        """Must be made before `fully_shard` is applied, which replaces the parameter objects during a pass."""
        self._axis, self._device = axis, device
        self._name_of = {
            (id(module), own): f"{path}.{own}" if path else own
            for path, module in model.named_modules()
            for own, _ in module.named_parameters(recurse=False)
        }
        self._numbers = dict.fromkeys(self._name_of.values(), 0)
        self._passes = 0
        self._heard: set[str] = set()
        self._first_step = True
        self._gathers = False
        paths = {id(module): path for path, module in model.named_modules()}
        self._units = [(unit, paths[id(unit)]) for unit in units]
        for unit, _ in self._units:
            unit.register_forward_hook(self._listen)

    def compare_gathers(self) -> None:
        """Registers hooks that run before the gathers of `fully_shard`. Call it after `fully_shard`."""
        for number, (unit, _) in enumerate(self._units):
            unit.register_forward_pre_hook(partial(self._before, number), prepend=True)
        self._units[-1][0].register_forward_hook(self._after)

    def begin(self) -> None:
        self._numbers = dict.fromkeys(self._numbers, 0)
        self._passes = 0

    def end_pass(self) -> None:
        self._passes += 1

    def check(self) -> None:
        """Compares the use of all parameters, once per step. All ranks come to the same result."""
        numbers = list(self._numbers.values())
        both = torch.tensor([numbers, [one * one for one in numbers]], dtype=torch.int64, device=self._device)
        sums, squares = collectives.all_reduce(both, self._axis).tolist()
        ranks = self._axis.size
        for name, total, square in zip(self._numbers, sums, squares, strict=True):
            if ranks * square != total * total:  # then the numbers are not all equal
                raise ConfigError(f"{name}: was used by some ranks and not by others in this step, but {_WAY_OUT}")
        self._first_step = False

    def _before(self, number: int, unit: nn.Module, *_: Any) -> None:
        """Compares ranks before a gather, in the first step. A unit that is gathered already needs no comparison."""
        if self._first_step and any(_divided_now(parameter) for parameter in unit.parameters()):
            self._gathers = True
            if unit is not self._units[-1][0]:
                self._compare(number)

    def _after(self, *_: Any) -> None:
        if self._first_step and self._gathers:
            self._gathers = False
            self._compare(len(self._units) - 1)

    def _compare(self, number: int) -> None:
        """All-gathers the index of the unit that each rank gathers next, or of the last one at the end of the pass. All
        ranks raise if the indices differ."""
        mine = torch.tensor([number], device=self._device)
        first, *others = sorted({int(one) for one in collectives.all_gather(mine, self._axis)})
        if others:
            path = self._units[first][1]
            raise ConfigError(f"{path}: is used by some ranks while others use another layer or none, but {_WAY_OUT}")

    def unused(self, names: Iterable[str]) -> list[str]:
        """Returns the parameters without a gradient in this step, the same on all ranks after `check`."""
        return [name for name in names if not self._numbers[name]]

    def _listen(self, unit: nn.Module, *_: Any) -> None:
        """Registers hooks on the parameters of a unit while they are gathered, because gradients arrive at the gathered
        parameters."""
        for module in unit.modules():
            for own, parameter in module.named_parameters(recurse=False):
                name = self._name_of.get((id(module), own))
                trained = parameter.requires_grad and not _divided_now(parameter)
                if trained and name is not None and name not in self._heard:
                    self._heard.add(name)
                    parameter.register_post_accumulate_grad_hook(partial(self._came, name))

    def _came(self, name: str, *_: Any) -> None:
        self._numbers[name] |= 1 << self._passes % _PASSES


def _divided_now(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "device_mesh")  # a DTensor is not gathered now
