"""`RunConfig`: the sections of one run, built once and handed down. A class takes its section, not the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from types import MappingProxyType
from typing import Any

from megatron.config.flag import Setting, settings_of
from megatron.config.sections import (
    CheckpointConfig,
    CpuConfig,
    DataConfig,
    EvaluationConfig,
    KernelsConfig,
    LoggingConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    ProfileConfig,
    RecomputeConfig,
    RuntimeConfig,
    ScheduleConfig,
    TokenizerConfig,
    TrainingConfig,
)

SECTIONS: Mapping[str, type] = MappingProxyType(
    {
        "model": ModelConfig,
        "moe": MoEConfig,
        "parallel": ParallelConfig,
        "training": TrainingConfig,
        "optimizer": OptimizerConfig,
        "schedule": ScheduleConfig,
        "precision": PrecisionConfig,
        "recompute": RecomputeConfig,
        "kernels": KernelsConfig,
        "cpu": CpuConfig,
        "data": DataConfig,
        "tokenizer": TokenizerConfig,
        "checkpoint": CheckpointConfig,
        "logging": LoggingConfig,
        "evaluation": EvaluationConfig,
        "profile": ProfileConfig,
        "runtime": RuntimeConfig,
    }
)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
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

    # How the values came about; no part of the configuration's meaning, and never saved.
    notices: tuple[str, ...] = field(default=(), compare=False)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    def value(self, setting: Setting) -> Any:
        return getattr(getattr(self, setting.section), setting.name)


@cache
def all_settings() -> tuple[Setting, ...]:
    """Every setting of every section, in the order of the sections."""
    return tuple(setting for section, cls in SECTIONS.items() for setting in settings_of(section, cls))


@cache
def settings_by_name() -> Mapping[str, Setting]:
    """Field name -> setting; field names are unique over all sections, as Megatron's flags are."""
    by_name = {setting.name: setting for setting in all_settings()}
    assert len(by_name) == len(all_settings()), "two sections have a field of the same name"
    return MappingProxyType(by_name)


def build(values: Mapping[str, Any], **meta: Any) -> RunConfig:
    """A RunConfig with the given fields (by field name) set and all others at their default."""
    sections = {}
    for section, cls in SECTIONS.items():
        names = {f.name for f in fields(cls)}
        sections[section] = cls(**{name: value for name, value in values.items() if name in names})
    return RunConfig(**sections, **meta)
