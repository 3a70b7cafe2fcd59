"""What a program may ask the engine of any model: counts, sizes, rates, where it runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from megatron.engine.any_model.ranks import Place
from megatron.engine.any_model.settings import EngineSettings
from megatron.optimizer import Optimizer


@dataclass
class Calls:
    """What has been called so far. (Not attributes of the engine: those of a module are slow to set.)"""

    micro_steps: int = 0
    global_steps: int = 0
    skipped_steps: int = 0
    norm: float | None = None
    overflow: bool = False
    owed: bool = False  # a backward pass that step() has not counted
    begun: bool = False  # whether the buffers hold gradients of this accumulation
    adds_up: bool = False  # inside no_sync()
    updating: bool = False


class EngineFacts(nn.Module):
    settings: EngineSettings
    place: Place
    optimizer: torch.optim.Optimizer
    _calls: Calls
    _core: Optimizer

    @property
    def micro_steps(self) -> int:
        return self._calls.micro_steps

    @property
    def global_steps(self) -> int:
        """Updates, those that were skipped included."""
        return self._calls.global_steps

    @property
    def skipped_steps(self) -> int:
        return self._calls.skipped_steps

    @property
    def accumulated(self) -> int:
        """Micro-batches of the next update whose gradients are there already."""
        return max(self.micro_steps % self.gradient_accumulation_steps(), 1) if self._calls.begun else 0

    @property
    def device(self) -> torch.device:
        return self.place.device

    @property
    def local_rank(self) -> int:
        return self.place.local_rank

    @property
    def global_rank(self) -> int:
        return self.place.parallel.rank

    @property
    def world_size(self) -> int:
        return self.place.parallel.world.size

    @property
    def loss_scale(self) -> float:
        return self._core.loss_scale

    def train_batch_size(self) -> int:
        return self.settings.batch.whole

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.settings.batch.micro

    def gradient_accumulation_steps(self) -> int:
        return self.settings.batch.accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the step of this micro-batch makes the update."""
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def zero_optimization_stage(self) -> int:
        return self.settings.zero_stage

    def get_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """The gradient norm of the last update, before clipping; None before the first."""
        return self._calls.norm

    def was_step_applied(self) -> bool:
        """Whether the last update was made, and not skipped for an overflow."""
        return self.global_steps > 0 and not self._calls.overflow
