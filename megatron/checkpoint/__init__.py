"""Checkpoints: Megatron's classic tree, files that execute no code, and a manifest that checks every byte.

What is exported is imported when it is first asked for: the command lines of this package answer without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.checkpoint.architecture import check_architecture, model_config
    from megatron.checkpoint.background import Background
    from megatron.checkpoint.besides_tensors import saved_values
    from megatron.checkpoint.determinism import determinism_fingerprint
    from megatron.checkpoint.found_step import FoundStep, find_checkpoint
    from megatron.checkpoint.load import load_checkpoint
    from megatron.checkpoint.lock import DirectoryLock
    from megatron.checkpoint.non_persistent import NonPersistent
    from megatron.checkpoint.reader import StepReader
    from megatron.checkpoint.retention import warning_before_training
    from megatron.checkpoint.save import Save, hold_directory, save_checkpoint, save_now
    from megatron.checkpoint.state import LoadedState, Retention, RunHistory, SavedInfo, Sharded, TrainState, writes
    from megatron.checkpoint.verify import DamagedCheckpointError, inspect_step

__all__ = [
    "Background",
    "DamagedCheckpointError",
    "DirectoryLock",
    "FoundStep",
    "LoadedState",
    "NonPersistent",
    "Retention",
    "RunHistory",
    "Save",
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
    "model_config",
    "save_checkpoint",
    "save_now",
    "saved_values",
    "warning_before_training",
    "writes",
]

_LAZY = {
    "check_architecture": "megatron.checkpoint.architecture",
    "model_config": "megatron.checkpoint.architecture",
    "Background": "megatron.checkpoint.background",
    "determinism_fingerprint": "megatron.checkpoint.determinism",
    "FoundStep": "megatron.checkpoint.found_step",
    "find_checkpoint": "megatron.checkpoint.found_step",
    "load_checkpoint": "megatron.checkpoint.load",
    "DirectoryLock": "megatron.checkpoint.lock",
    "StepReader": "megatron.checkpoint.reader",
    "NonPersistent": "megatron.checkpoint.non_persistent",
    "warning_before_training": "megatron.checkpoint.retention",
    "hold_directory": "megatron.checkpoint.save",
    "Save": "megatron.checkpoint.save",
    "save_checkpoint": "megatron.checkpoint.save",
    "save_now": "megatron.checkpoint.save",
    "saved_values": "megatron.checkpoint.besides_tensors",
    "LoadedState": "megatron.checkpoint.state",
    "writes": "megatron.checkpoint.state",
    "Retention": "megatron.checkpoint.state",
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
