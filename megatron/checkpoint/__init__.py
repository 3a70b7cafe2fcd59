"""Checkpoints: Megatron's classic tree, files that execute no code, and a manifest that checks every byte.

What is exported is imported when it is first asked for: the command lines of this package answer without torch.
"""


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
    from megatron.checkpoint.run_state import LoadedState, Retention, RunHistory, SavedInfo, Sharded, TrainState, writes
    from megatron.checkpoint.save import Save, hold_directory, save_checkpoint, save_now
    from megatron.checkpoint.verify import DamagedCheckpointError, inspect_step

_OFFERS = {
    "architecture": ("check_architecture", "model_config"),
    "background": ("Background",),
    "besides_tensors": ("saved_values",),
    "determinism": ("determinism_fingerprint",),
    "found_step": ("FoundStep", "find_checkpoint"),
    "load": ("load_checkpoint",),
    "lock": ("DirectoryLock",),
    "non_persistent": ("NonPersistent",),
    "reader": ("StepReader",),
    "retention": ("warning_before_training",),
    "run_state": ("LoadedState", "Retention", "RunHistory", "SavedInfo", "Sharded", "TrainState", "writes"),
    "save": ("Save", "hold_directory", "save_checkpoint", "save_now"),
    "verify": ("DamagedCheckpointError", "inspect_step"),
}


def __getattr__(name: str) -> Any:
    for module, names in _OFFERS.items():
        if name in names:
            return getattr(import_module(f"megatron.checkpoint.{module}"), name)
    raise AttributeError(f"module 'megatron.checkpoint' has no attribute '{name}'")
