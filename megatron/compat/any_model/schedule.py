"""Scheduler that a configuration names, as an object that steps an optimizer's groups."""

import inspect
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from megatron.config.sections.deepspeed_scheduler import DeepSpeedSchedulerConfig
from megatron.distributed.messages import all_gather_json
from megatron.distributed.parallel_state import Axis
from megatron.errors import ConfigError
from megatron.optimizer import DeepSpeedCurve


def scheduler_arguments(scheduler: Any, lr_kwargs: Mapping[str, Any] | None, dp: Axis) -> dict[str, Any]:
    """Returns the arguments of the scheduler's next step, such as ReduceLROnPlateau's metrics. Raises if they differ
    between ranks, whose rates would differ too. All ranks call it before the update."""
    given = dict(lr_kwargs or {})
    if scheduler is None:
        return {}
    missing = [name for name in _required(scheduler) if name not in given]
    if missing:
        raise ConfigError(
            f"engine.step(): lr_scheduler is a {type(scheduler).__name__}, whose step() needs {', '.join(missing)}; "
            f"call engine.step(lr_kwargs={{'{missing[0]}': ...}}), or do not give lr_scheduler to "
            "megatron.compat.initialize() and call its step() yourself"
        )
    for name, value in given.items() if dp.size > 1 else ():
        values = all_gather_json(repr(value.item() if isinstance(value, torch.Tensor) else value), dp, str)
        if len(set(values)) > 1:
            other = next(rank for rank, one in enumerate(values) if one != values[0])
            raise ConfigError(
                f"engine.step(): lr_kwargs['{name}'] is {values[0]} on rank 0 and {values[other]} on rank {other}, so "
                "their learning rates would differ; give all ranks one value, such as their mean "
                "from torch.distributed.all_reduce"
            )
    return given


def _required(scheduler: Any) -> list[str]:
    with suppress(TypeError, ValueError):  # a step() without a signature
        parameters = inspect.signature(scheduler.step).parameters.values()
        return [
            one.name
            for one in parameters
            if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        ]
    return []


class ConfiguredSchedule:
    """Sets the learning rate of the next update, at construction and after every update. The rate depends only on the
    number of updates."""

    def __init__(self, optimizer: torch.optim.Optimizer, settings: DeepSpeedSchedulerConfig) -> None:
        self.optimizer = optimizer
        self._curves = [DeepSpeedCurve(float(group["lr"]), 1, settings) for group in optimizer.param_groups]
        self.updates = 0
        self._set()

    def step(self) -> None:
        self.updates += 1
        self._set()

    def get_last_lr(self) -> list[float]:
        return [curve.of_update(self.updates) for curve in self._curves]

    get_lr = get_last_lr

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "curves": [curve.plain() for curve in self._curves]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the saved curves and number of updates."""
        self._curves = [DeepSpeedCurve.of_plain(dict(curve)) for curve in state["curves"]]
        self.updates = int(state["updates"])
        self._set()

    def _set(self) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.get_last_lr(), strict=True):
            group["lr"] = lr
