"""Accessors of the engine for any model: counts, sizes, rates and placement."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from megatron.compat.any_model.engine_settings import BatchSizes, EngineSettings
from megatron.compat.any_model.ranks import RankPlacement
from megatron.compat.rule_optimizer import RuleOptimizer
from megatron.errors import ConfigError
from megatron.optimizer import Optimizer
from megatron.utils.dtype import HALF
from megatron.utils.log import RankLog


@dataclass
class Calls:
    """Counters and flags of the calls so far. Stored in one object, because nn.Module sets attributes slowly."""

    micro_steps: int = 0
    global_steps: int = 0
    skipped_steps: int = 0
    norm: float | None = None
    overflow: bool = False
    owed: bool = False  # a backward pass that step() has not counted
    begun: bool = False  # the buffers hold gradients of this accumulation
    counted: int = 0  # micro-batches of this accumulation that step() has counted
    global_samples: int = 0
    adds_up: bool = False  # inside no_sync()
    boundary: bool | None = None  # what set_gradient_accumulation_boundary() has set
    armed: bool = False  # the last backward pass reduces what was accumulated
    updating: bool = False
    destroyed: bool = False


class EngineFacts(nn.Module):
    module: nn.Module
    lr_scheduler: Any
    settings: EngineSettings
    place: RankPlacement
    optimizer: torch.optim.Optimizer
    training_dataloader: Any
    log: RankLog
    _calls: Calls
    _core: Optimizer

    @property
    def micro_steps(self) -> int:
        return self._calls.micro_steps

    @property
    def global_steps(self) -> int:
        """Number of updates, including skipped ones."""
        return self._calls.global_steps

    @property
    def skipped_steps(self) -> int:
        return self._calls.skipped_steps

    @property
    def accumulated(self) -> int:
        """Number of micro-batches of the next update whose gradients are accumulated."""
        return max(self._calls.counted, 1) if self._calls.begun else 0

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
    def dp_world_size(self) -> int:
        return self.place.parallel.dp.size

    def get_data_parallel_rank(self) -> int:
        return self.place.parallel.dp.rank

    @property
    def global_samples(self) -> int:
        """Samples of all updates, including skipped ones."""
        return self._calls.global_samples

    def restore_counters(self, global_steps: int, skipped_steps: int, global_samples: int) -> None:
        self._calls.global_steps, self._calls.skipped_steps = global_steps, skipped_steps
        self._calls.global_samples = global_samples
        self._calls.micro_steps = global_steps * self.gradient_accumulation_steps()

    # precision

    @property
    def cur_scale(self) -> float:
        """The loss scale of the next backward pass."""
        return self._core.loss_scale

    def loss_scale(self) -> float:
        """Static loss scale of the configuration; 0 means dynamic."""
        return self.settings.precision.loss_scale or 0.0

    def dynamic_loss_scale(self) -> bool:
        return self.loss_scale() == 0

    def initial_dynamic_scale(self) -> float:
        return self.settings.precision.initial_loss_scale

    def fp16_enabled(self) -> bool:
        return self.settings.precision.fp16

    def bfloat16_enabled(self) -> bool:
        return self.settings.precision.bf16

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Dtypes of the model's parameters and of accumulated gradients."""
        dtype = getattr(torch, self.settings.precision.params_dtype)
        return dtype, torch.float32 if dtype in HALF else dtype

    # batches and accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """Batch size, micro-batch size of a rank, and accumulation steps."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def train_batch_size(self) -> int:
        return self.settings.batch.whole

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.settings.batch.micro

    def gradient_accumulation_steps(self) -> int:
        return self.settings.batch.accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """True if step() for the current micro-batch makes the update."""
        if self._calls.boundary is not None:
            return self._calls.boundary
        return self._calls.counted + 1 >= self.gradient_accumulation_steps()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Sets whether the next backward passes end an accumulation. With None, micro-batches are counted again. Must
        be set to true before the last backward pass of an update. While false, step() need not be called."""
        self._calls.boundary = is_boundary if is_boundary is None else bool(is_boundary)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the number of accumulation steps. The micro-batch size stays."""
        self._set_batch("set_train_batch_size()", train_batch_size, self.settings.batch.micro, None)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the micro-batch size. The number of accumulation steps stays."""
        self._set_batch("set_train_micro_batch_size()", None, micro_batch_size, self.settings.batch.accumulation)
        if self.training_dataloader is not None:
            self.log.info(
                "set_train_micro_batch_size(): no effect on the loader of megatron.compat.initialize(), which keeps "
                "its batch size; make a DataLoader of your own"
            )

    def _set_batch(self, call: str, whole: int | None, micro: int, accumulation: int | None) -> None:
        if self.accumulated:
            raise ConfigError(
                f"engine.{call}: {self.accumulated} of {self.gradient_accumulation_steps()} micro-batches of an update "
                "are done; call it after the update (when engine.global_steps has increased)"
            )
        try:
            batch = BatchSizes.fit(whole, micro, accumulation, self.dp_world_size)
        except ConfigError as error:
            raise ConfigError(f"engine.{call}: {error}") from None
        self.settings = replace(self.settings, batch=batch)

    # ZeRO

    def zero_optimization_stage(self) -> int:
        return self.settings.zero_stage

    def zero_optimization(self) -> bool:
        return self.settings.zero_stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        return self.settings.zero_stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self.settings.zero_stage >= 3

    def zero_overlap_comm(self) -> bool:
        return self.settings.overlap

    def zero_cpu_offload(self) -> bool:
        """True if the configuration offloads the optimizer, which has no effect on a CPU."""
        given = self.settings.given
        old = bool(given.get("zero_optimization.cpu_offload"))
        return old or given.get("zero_optimization.offload_optimizer.device") == "cpu"

    zero_use_cpu_optimizer = zero_cpu_offload

    # what the configuration says

    def zero_offload_optimizer(self) -> dict[str, Any] | None:
        return self._block("zero_optimization.offload_optimizer")

    def zero_offload_param(self) -> dict[str, Any] | None:
        return self._block("zero_optimization.offload_param")

    def zero_allow_untested_optimizer(self) -> bool:
        return bool(self.settings.given.get("zero_allow_untested_optimizer", False))

    def gradient_clipping(self) -> float:
        return self.settings.clip_grad

    def steps_per_print(self) -> int | None:
        return self.settings.log_interval

    def optimizer_name(self) -> str:
        """Class name of the optimizer that was passed to initialize(), or the type that the configuration names."""
        if not isinstance(self.optimizer, RuleOptimizer):
            return type(self.optimizer).__name__
        name = str(self.settings.given["optimizer.type"])
        return name if name == "SGD" else name.lower()

    def optimizer_params(self) -> dict[str, Any] | None:
        return self._block("optimizer.params")

    def scheduler_name(self) -> str | None:
        return self.settings.given.get("scheduler.type")

    def scheduler_params(self) -> dict[str, Any] | None:
        return self._block("scheduler.params")

    def _block(self, path: str) -> dict[str, Any] | None:
        """Returns key -> value for the keys of block `path` that the configuration has; None if it has none."""
        given = self.settings.given
        return {key[len(path) + 1 :]: value for key, value in given.items() if key.startswith(f"{path}.")} or None

    # the optimizer

    def get_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of all groups. A scheduler overwrites it at its next step."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """Momentum of SGD and RMSprop, betas of other optimizers, for each group."""
        own = self.settings.momentum if isinstance(self.optimizer, RuleOptimizer) else 0.0
        name = "momentum" if self.optimizer_name() in ("SGD", "RMSprop") else "betas"
        return [group.get(name, own) for group in self.optimizer.param_groups]

    def get_type(self) -> list[Any]:
        """Value of `type` for each group, or 0.0 without one."""
        return [group.get("type", 0.0) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """The gradient norm of the last update, before clipping; None before the first."""
        return self._calls.norm

    def was_step_applied(self) -> bool:
        """True if the last update was made, and not skipped for an overflow."""
        return self.global_steps > 0 and not self._calls.overflow
