"""Reads the weights of a checkpoint that Megatron-LM 23.06 wrote: one file at TP 1 and PP 1, without a manifest.

The weights-only loader admits the classes named here and runs none of their code. Such a file has no checksums, so only
its weights are taken, and only under --finetune.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint import classic, manifest, paths, safe_load, slices
from megatron.checkpoint.all_ranks import run_on_all
from megatron.checkpoint.state import LoadedState, Sharded
from megatron.distributed.state import ParallelState
from megatron.errors import CheckpointError
from megatron.model.parameters import VOCABULARY_TABLES, classic_path

Log = Callable[[str], object]


class _ModelType(Enum):
    """A stand-in for Megatron's enumeration, which its `args` contain."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2


def _member(owner: object, name: str) -> _ModelType:
    """Python 3.11.0 to 3.11.3 pickle a member of an enumeration as getattr(owner, name); no other getattr is
    allowed."""
    if owner is not _ModelType:
        raise CheckpointError(f"it asks for the attribute {name!r} of {owner!r}")
    return _ModelType[name]


_ALLOWED: tuple[Any, ...] = (
    Namespace,
    (_member, "builtins.getattr"),
    (_ModelType, "megatron.core.enums.ModelType"),
    (_ModelType, "megatron.model.enums.ModelType"),
)


@dataclass(frozen=True)
class _Step:
    directory: Path
    content: Mapping[str, Any]


def load_megatron_lm(
    directory: Path, step: int | None, *, parallel: ParallelState, params: Mapping[str, Sharded], log: Log
) -> LoadedState | None:
    """Fills `params` if Megatron-LM wrote the step that the tracker or `step` names; None if it did not."""
    found = _find(directory, step)
    if found is None:
        return None
    run_on_all(lambda: _load_weights(found, params, log), parallel.world)
    return LoadedState(path=found.directory, step=int(found.content.get("iteration", 0)))


def _find(directory: Path, step: int | None) -> _Step | None:
    """A step that never had a manifest."""
    if step is None:
        tracker = paths.read_tracker(directory)
        chosen = directory / paths.RELEASE if tracker.release else None
        if tracker.step is not None:
            chosen = paths.step_directory(directory, tracker.step)
    else:
        chosen = paths.step_directory(directory, step)
    if chosen is None or not paths.is_plain_directory(chosen) or (chosen / paths.MANIFEST).exists():
        return None
    ranks = sorted(entry.name for entry in chosen.iterdir() if entry.name.startswith("mp_rank_"))
    if not ranks:
        return None
    if ranks != ["mp_rank_00"]:
        raise CheckpointError(
            f"{chosen} has no manifest and {len(ranks)} model-parallel files; merge them to TP 1, PP 1 with Megatron's "
            "own checkpoint_util.py first"
        )
    path = paths.member(chosen, f"mp_rank_00/{paths.MODEL_FILE}")
    content = safe_load.load_file(path, allow=_ALLOWED)
    if not isinstance(content, Mapping) or "has_manifest" in content:
        return None
    return _Step(chosen, content)


@torch.no_grad()
def _load_weights(step: _Step, params: Mapping[str, Sharded], log: Log) -> None:
    version = step.content.get("checkpoint_version", 0)
    if not isinstance(version, (int, float)) or version < 2.0:
        raise CheckpointError(f"{step.directory} has checkpoint_version {version}; its QKV order needs 2.0 or newer")
    encoder = classic.lookup(step.content, ("model", "language_model"))
    if not isinstance(encoder, Mapping):
        raise CheckpointError(f"{step.directory} is not a GPT checkpoint of Megatron 23.06 (no language_model)")
    log(f"warning: {step.directory} was written by Megatron-LM without checksums; taking its weights alone")
    for name, (spec, target) in params.items():
        found = _tensor(step, name)
        piece = manifest.Slice("", (), None, tuple(found.shape))
        record = manifest.TensorRecord(tuple(spec.logical_shape), str(found.dtype), spec.dim, (piece,))
        _check_size(step, name, found, record)
        slices.fill(spec, target, record, partial(_same, found), cast=True)


def _same(tensor: Tensor, piece: manifest.Slice) -> Tensor:
    """The file holds each tensor as one slice, the whole of it."""
    return tensor


def _tensor(step: _Step, name: str) -> Tensor:
    key = classic_path(name)
    old = tuple("transformer" if part == "encoder" else part.replace(".self_attention.", ".attention.") for part in key)
    for candidate in (key, old):
        found = classic.lookup(step.content, ("model", *candidate))
        if isinstance(found, Tensor):
            return found.contiguous()
    raise CheckpointError(f"{step.directory} has no {'.'.join(key)}: it is of another model")


def _check_size(step: _Step, name: str, found: Tensor, record: manifest.TensorRecord) -> None:
    padded = name in VOCABULARY_TABLES and found.dim() == 2 and found.shape[0] >= record.logical_shape[0]
    fits = found.shape[1:] == record.logical_shape[1:] if padded else found.numel() == prod(record.logical_shape)
    if not fits:
        raise CheckpointError(
            f"{step.directory}: {name} has shape {tuple(found.shape)}, the model needs {record.logical_shape}"
        )
