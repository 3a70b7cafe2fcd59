"""All settings of a run, in sections. A `RunConfig` is built once; other classes take only the section they need."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from types import MappingProxyType
from typing import Any, cast

from megatron.config.flag import Setting, settings_of
from megatron.config.sections.checkpoint import CheckpointConfig
from megatron.config.sections.data import DataConfig, TokenizerConfig
from megatron.config.sections.deepspeed_scheduler import DeepSpeedSchedulerConfig
from megatron.config.sections.kernels import KernelsConfig
from megatron.config.sections.logging import EvaluationConfig, LoggingConfig, ProfileConfig
from megatron.config.sections.model import ModelConfig
from megatron.config.sections.moe import MoEConfig
from megatron.config.sections.optimizer import OptimizerConfig, ScheduleConfig
from megatron.config.sections.parallel import ParallelConfig
from megatron.config.sections.precision import PrecisionConfig, RecomputeConfig
from megatron.config.sections.runtime import CpuConfig, RuntimeConfig
from megatron.config.sections.training import TrainingConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a run. Flags, YAML reader, checkpoints and docs/flags.md are derived from the fields."""

    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    deepspeed_scheduler: DeepSpeedSchedulerConfig = field(default_factory=DeepSpeedSchedulerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    cpu: CpuConfig = field(default_factory=CpuConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    # Origins of the values, and notices about them. They are neither compared nor saved.
    notices: tuple[str, ...] = field(default=(), compare=False)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    keys: Mapping[str, str] | None = field(default=None, compare=False)
    """Setting name -> configuration key, for messages of runs without a command line."""

    def given(self, name: str) -> bool:
        """Returns True if a flag or a file set `name`. Values of a preset or a checkpoint do not count."""
        origin = self.origins.get(name)
        return origin is not None and not origin.startswith(("preset ", "checkpoint"))

    def value(self, setting: Setting) -> Any:
        return getattr(getattr(self, setting.section), setting.name)


SECTIONS: Mapping[str, type] = MappingProxyType(
    {f.name: cast(type, f.default_factory) for f in fields(RunConfig) if f.compare}
)
"""Section name -> its class, in the order of RunConfig's fields."""


@cache
def all_settings() -> tuple[Setting, ...]:
    """Every setting, in the order of the sections."""
    return tuple(setting for section, cls in SECTIONS.items() for setting in settings_of(section, cls))


@cache
def settings_by_name() -> Mapping[str, Setting]:
    """Settings by field name, which is unique over all sections, like Megatron's flags."""
    by_name = {setting.name: setting for setting in all_settings()}
    assert len(by_name) == len(all_settings()), "two sections have a field of the same name"
    return MappingProxyType(by_name)


def build(values: Mapping[str, Any], **meta: Any) -> RunConfig:
    """Builds a RunConfig with these fields (of any section) set and all others at their default."""
    built = {}
    for section, cls in SECTIONS.items():
        names = {f.name for f in fields(cls)}
        built[section] = cls(**{name: value for name, value in values.items() if name in names})
    return RunConfig(**built, **meta)
