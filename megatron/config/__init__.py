"""The settings of a run. Importing this package loads neither torch nor numpy, so `--help` is fast.

`parse_args(argv)` reads flags, presets and YAML into one frozen `RunConfig`; a class is handed the section it needs.
`check` needs nothing but the settings, `check_world` the number of ranks and `check_paths` the file system.
"""

from megatron.config.batch import BatchPlan
from megatron.config.checks import check, check_paths, check_world
from megatron.config.cli import parse_args
from megatron.config.run import RunConfig, build
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
from megatron.config.serialize import adopt_checkpoint_args, describe, from_dict, to_dict, to_yaml

__all__ = [
    "BatchPlan",
    "CheckpointConfig",
    "CpuConfig",
    "DataConfig",
    "EvaluationConfig",
    "KernelsConfig",
    "LoggingConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "ProfileConfig",
    "RecomputeConfig",
    "RunConfig",
    "RuntimeConfig",
    "ScheduleConfig",
    "TokenizerConfig",
    "TrainingConfig",
    "adopt_checkpoint_args",
    "build",
    "check",
    "check_paths",
    "check_world",
    "describe",
    "from_dict",
    "parse_args",
    "to_dict",
    "to_yaml",
]
