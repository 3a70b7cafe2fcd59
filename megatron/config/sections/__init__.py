"""The sections of a run's settings: one frozen, keyword-only dataclass each, with a help text for every field.

Field name = Megatron-LM's flag with underscores; `--no-X` and `--disable-X` switches are booleans, default True.
"""

from megatron.config.sections.checkpoint import CheckpointConfig
from megatron.config.sections.cpu import CpuConfig
from megatron.config.sections.data import DataConfig, TokenizerConfig
from megatron.config.sections.kernels import KernelsConfig
from megatron.config.sections.logging import EvaluationConfig, LoggingConfig
from megatron.config.sections.model import ModelConfig
from megatron.config.sections.moe import MoEConfig
from megatron.config.sections.optimizer import OptimizerConfig, ScheduleConfig
from megatron.config.sections.parallel import ParallelConfig
from megatron.config.sections.precision import PrecisionConfig, RecomputeConfig
from megatron.config.sections.profile import ProfileConfig
from megatron.config.sections.runtime import RuntimeConfig
from megatron.config.sections.training import TrainingConfig

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
    "RuntimeConfig",
    "ScheduleConfig",
    "TokenizerConfig",
    "TrainingConfig",
]
