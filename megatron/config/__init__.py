"""The settings of a run. Importing this package loads neither torch nor numpy, so `--help` is fast.

`parse_args(argv)` reads flags, presets and YAML into one frozen `RunConfig`. A class that needs settings receives only
their section. `check_settings` uses only the settings, `check_world` also the number of ranks, and `check_paths` also
the file system.
"""

from megatron.config.batch import BatchPlan
from megatron.config.checks import check_paths, check_settings, check_world
from megatron.config.cli import parse_args
from megatron.config.run import RunConfig, build
from megatron.config.sections.checkpoint import CheckpointConfig
from megatron.config.sections.data import DataConfig, TokenizerConfig
from megatron.config.sections.kernels import KernelsConfig
from megatron.config.sections.logging import EvaluationConfig, LoggingConfig, ProfileConfig
from megatron.config.sections.model import ModelConfig
from megatron.config.sections.moe import MoEConfig
from megatron.config.sections.optimizer import OptimizerConfig, ScheduleConfig
from megatron.config.sections.parallel import ParallelConfig
from megatron.config.sections.precision import PrecisionConfig, RecomputeConfig
from megatron.config.sections.runtime import CpuConfig, RuntimeConfig
from megatron.config.sections.training import TrainingConfig
from megatron.config.serialize import adopt_checkpoint_args, describe, from_dict, to_dict
