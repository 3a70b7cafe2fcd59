"""Checkpoints: Megatron's classic tree, files that execute no code, and a manifest that checks every byte.

What is exported is imported when it is first asked for: the command lines of this package answer without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_LAZY = {
    "check_architecture": "megatron.checkpoint.architecture",
    "model_config": "megatron.checkpoint.architecture",
    "determinism_fingerprint": "megatron.checkpoint.determinism",
    "FoundStep": "megatron.checkpoint.load",
    "find_checkpoint": "megatron.checkpoint.load",
    "load_checkpoint": "megatron.checkpoint.load",
    "DirectoryLock": "megatron.checkpoint.lock",
    "load_megatron_lm": "megatron.checkpoint.megatron_lm",
    "StepReader": "megatron.checkpoint.reader",
    "warning_before_training": "megatron.checkpoint.retention",
    "hold_directory": "megatron.checkpoint.save",
    "save_checkpoint": "megatron.checkpoint.save",
    "LoadedState": "megatron.checkpoint.state",
    "RunHistory": "megatron.checkpoint.state",
    "SavedInfo": "megatron.checkpoint.state",
    "Sharded": "megatron.checkpoint.state",
    "TrainState": "megatron.checkpoint.state",
    "DamagedCheckpointError": "megatron.checkpoint.verify",
    "inspect_step": "megatron.checkpoint.verify",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'megatron.checkpoint' has no attribute '{name}'")
