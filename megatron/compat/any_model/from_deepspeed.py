"""Converts DeepSpeed's configuration to settings of the engine."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from megatron.compat.any_model.engine_settings import BatchSizes, EngineSettings
from megatron.compat.any_model.schedule import ConfiguredSchedule
from megatron.compat.deepspeed_file import DeepSpeedSettings, read_deepspeed
from megatron.compat.deepspeed_file.table import keys_by_field
from megatron.config.checks import exclusions
from megatron.config.checks.model import check_precision
from megatron.config.checks.parallel import check_zero
from megatron.config.checks.training import check_deepspeed_scheduler
from megatron.config.notices import without_effect
from megatron.config.refusals import Refusals
from megatron.config.run import RunConfig, build, settings_by_name
from megatron.errors import ConfigError
from megatron.optimizer import build_rule
from megatron.optimizer.rules import UpdateRule

_USED_SECTIONS = ("optimizer", "precision", "deepspeed_scheduler")
_USED = (
    *("global_batch_size", "micro_batch_size", "gradient_accumulation_steps", "zero_stage", "overlap_grad_reduce"),
    *("remote_device", "lr", "log_interval"),
)
_UNUSED = ("optimizer_offload_fraction",)
_KEYS_OF_FLAGS = {
    "--zero-stage": "zero_optimization.stage",
    "--lr-schedule": "scheduler.type",
    "--fp16": "fp16.enabled",
}
_DEFAULT_LR = 1e-3  # of torch's and DeepSpeed's AdamW


class EngineConfig:
    """Checked configuration, from which `settings` follow once the number of ranks is known."""

    def __init__(self, source: Mapping[str, Any] | str | Path) -> None:
        refusals = Refusals()
        try:
            self._read: DeepSpeedSettings = read_deepspeed(source)
        except ConfigError as error:  # reading a file names a flag that initialize() lacks
            raise ConfigError(str(error).replace("--deepspeed_config ", "config ")) from None
        origins = {name: self._read.origin_of(name) for name in self._read.values}
        self.run: RunConfig = build(self._read.values, origins=origins, keys=keys_by_field())
        for check in (check_precision, check_deepspeed_scheduler, check_zero):
            with refusals.of_checking():
                check(self.run)
        for text in exclusions(self.run, counts=_is_used):
            refusals.refuse(ConfigError(text))
        if (directory := self._read.spelled.get("optimizer_offload_directory")) is not None:
            refusals.refuse(
                ConfigError(
                    f"in {self._read.origin}: {directory}: the engine for any model keeps optimizer state in memory; "
                    "use offload_optimizer.device cpu, or remove offload_optimizer"
                )
            )
        refusals.end()

    def settings(self, ranks: int) -> EngineSettings:
        training, given = self.run.training, self._read.values
        sizes = training.global_batch_size, given.get("micro_batch_size"), training.gradient_accumulation_steps
        try:
            batch = BatchSizes.fit(*sizes, ranks)
        except ConfigError as error:
            raise ConfigError(f"in {self._read.origin}: {error}") from None
        return EngineSettings(
            batch=batch,
            precision=self.run.precision,
            zero_stage=given.get("zero_stage") or 0,
            clip_grad=given.get("clip_grad", 0.0),
            offloads=given.get("optimizer_cpu_offload", False),
            parameters_on_host=self.run.parallel.parameters_on_host,
            overlap=given.get("overlap_grad_reduce", True),
            log_interval=given.get("log_interval"),
            given=MappingProxyType(self._read.content),
            momentum=self._momentum(),
        )

    def _momentum(self) -> float | tuple[float, float]:
        named = self.run.optimizer
        momenta: dict[str, float | tuple[float, float]]
        momenta = {"sgd": named.sgd_momentum, "muon": named.muon_momentum, "lion": (named.lion_beta1, named.lion_beta2)}
        return momenta.get(named.optimizer, (named.adam_beta1, named.adam_beta2))

    def rule(self, device: torch.device) -> UpdateRule:
        """The update rule of the optimizer that the configuration names."""
        try:
            return build_rule(self.run.optimizer, device)
        except ConfigError as error:
            raise ConfigError(f"in {self._read.origin}: {self.optimizer_key}: {error}") from None

    @property
    def optimizer_key(self) -> str | None:
        """The key that names an optimizer, with its value."""
        return self._read.spelled.get("optimizer")

    @property
    def scheduler_key(self) -> str | None:
        return self._read.spelled.get("lr_schedule")

    @property
    def lr(self) -> float:
        lr = self.run.schedule.lr
        return _DEFAULT_LR if lr is None else lr

    def scheduler(self, optimizer: torch.optim.Optimizer) -> ConfiguredSchedule | None:
        settings = self.run.deepspeed_scheduler
        return None if settings.lr_schedule is None else ConfiguredSchedule(optimizer, settings)

    def lines(self, *, own_optimizer: bool, own_scheduler: bool) -> list[str]:
        """Returns notices about settings without effect. `own_optimizer`, `own_scheduler`: True if the caller gave
        one."""
        lines = list(self._read.notices)
        if own_optimizer and self.optimizer_key is not None:
            lines.append(f"{self.optimizer_key}: no effect, because optimizer= is given and is used")
        if own_scheduler and self.scheduler_key is not None:
            lines.append(f"{self.scheduler_key}: no effect, because lr_scheduler= is given and is used")
        unused = [name for name in self._read.spelled if not _is_used(name)]
        lines += [
            f"{self._read.spelled[name]}: no effect in megatron.compat.initialize(model=...); it is for pretrain_gpt.py"
            for name in unused
        ]
        for setting, need in without_effect(self.run):
            if setting.name not in unused:
                needed = need.text
                for flag, key in _KEYS_OF_FLAGS.items():
                    needed = needed.replace(flag, key)
                lines.append(f"{self._read.spelled[setting.name]}: has no effect without {needed}")
        return lines


def _is_used(name: str) -> bool:
    used = name in _USED or settings_by_name()[name].section in _USED_SECTIONS
    return used and name not in _UNUSED
