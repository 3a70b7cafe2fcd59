"""What the user may set. Importing this loads neither torch nor numpy; `--help` is fast.

`parse_args(argv)` reads flags, presets and YAML into one frozen `RunConfig`, whose sections are handed to the classes
that need them; `check_*` are the checks that need to know ranks, device or files.
"""

from megatron.config.batch import (
    batch_size_at,
    data_parallel_size,
    global_batch_size,
    num_micro_batches_at,
    train_iters,
    train_samples,
)
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
    "batch_size_at",
    "build",
    "check",
    "check_paths",
    "check_world",
    "data_parallel_size",
    "describe",
    "from_dict",
    "global_batch_size",
    "num_micro_batches_at",
    "parse_args",
    "to_dict",
    "to_yaml",
    "train_iters",
    "train_samples",
]
