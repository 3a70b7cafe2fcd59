"""Checkpoints: Megatron's classic tree, files that execute no code, and a manifest that checks every byte."""

from megatron.checkpoint.architecture import check_architecture, model_config
from megatron.checkpoint.determinism import determinism_fingerprint
from megatron.checkpoint.load import FoundStep, find_checkpoint, load_checkpoint
from megatron.checkpoint.lock import DirectoryLock
from megatron.checkpoint.megatron_lm import load_megatron_lm
from megatron.checkpoint.reader import StepReader
from megatron.checkpoint.retention import warning_before_training
from megatron.checkpoint.save import hold_directory, save_checkpoint
from megatron.checkpoint.state import LoadedState, RunHistory, SavedInfo, Sharded, TrainState
from megatron.checkpoint.verify import DamagedCheckpointError, inspect_step

__all__ = [
    "DamagedCheckpointError",
    "DirectoryLock",
    "FoundStep",
    "LoadedState",
    "RunHistory",
    "SavedInfo",
    "Sharded",
    "StepReader",
    "TrainState",
    "check_architecture",
    "determinism_fingerprint",
    "find_checkpoint",
    "hold_directory",
    "inspect_step",
    "load_checkpoint",
    "load_megatron_lm",
    "model_config",
    "save_checkpoint",
    "warning_before_training",
]
