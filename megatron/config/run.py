"""`RunConfig`: all settings of a run, in sections. It is built once; a class is handed the section that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from types import MappingProxyType
from typing import Any, cast

from megatron.config import sections
from megatron.config.flag import Setting, settings_of


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One field per section; the flags, the YAML reader, the checkpoints and docs/flags.md follow from them."""

    model: sections.ModelConfig = field(default_factory=sections.ModelConfig)
    moe: sections.MoEConfig = field(default_factory=sections.MoEConfig)
    parallel: sections.ParallelConfig = field(default_factory=sections.ParallelConfig)
    training: sections.TrainingConfig = field(default_factory=sections.TrainingConfig)
    optimizer: sections.OptimizerConfig = field(default_factory=sections.OptimizerConfig)
    schedule: sections.ScheduleConfig = field(default_factory=sections.ScheduleConfig)
    precision: sections.PrecisionConfig = field(default_factory=sections.PrecisionConfig)
    recompute: sections.RecomputeConfig = field(default_factory=sections.RecomputeConfig)
    kernels: sections.KernelsConfig = field(default_factory=sections.KernelsConfig)
    cpu: sections.CpuConfig = field(default_factory=sections.CpuConfig)
    data: sections.DataConfig = field(default_factory=sections.DataConfig)
    tokenizer: sections.TokenizerConfig = field(default_factory=sections.TokenizerConfig)
    checkpoint: sections.CheckpointConfig = field(default_factory=sections.CheckpointConfig)
    logging: sections.LoggingConfig = field(default_factory=sections.LoggingConfig)
    evaluation: sections.EvaluationConfig = field(default_factory=sections.EvaluationConfig)
    profile: sections.ProfileConfig = field(default_factory=sections.ProfileConfig)
    runtime: sections.RuntimeConfig = field(default_factory=sections.RuntimeConfig)

    # Where the values came from. Neither compared nor saved.
    notices: tuple[str, ...] = field(default=(), compare=False)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

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
    """Settings by field name, which is unique over all sections as Megatron's flags are."""
    by_name = {setting.name: setting for setting in all_settings()}
    assert len(by_name) == len(all_settings()), "two sections have a field of the same name"
    return MappingProxyType(by_name)


def build(values: Mapping[str, Any], **meta: Any) -> RunConfig:
    """A RunConfig with these fields (by name, of any section) set and all others at their default."""
    built = {}
    for section, cls in SECTIONS.items():
        names = {f.name for f in fields(cls)}
        built[section] = cls(**{name: value for name, value in values.items() if name in names})
    return RunConfig(**built, **meta)
