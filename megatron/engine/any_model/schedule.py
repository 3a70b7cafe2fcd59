"""The scheduler that a configuration names, as an object that steps an optimizer's groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron.config.sections.deepspeed_scheduler import DeepSpeedSchedulerConfig
from megatron.optimizer import DeepSpeedCurve


class ConfiguredSchedule:
    """Sets the rate of the next update, when it is made and after every update. A pure function of their number."""

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
        """The curves are the saved ones."""
        self._curves = [DeepSpeedCurve.of_plain(dict(curve)) for curve in state["curves"]]
        self.updates = int(state["updates"])
        self._set()

    def _set(self) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.get_last_lr(), strict=True):
            group["lr"] = lr
