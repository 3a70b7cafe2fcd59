"""What one rank writes: its tensors in the classic tree, and a record of the logical slice that each of them is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint import classic
from megatron.checkpoint.architecture import model_config
from megatron.checkpoint.manifest import Slice, TensorRecord
from megatron.checkpoint.state import Sharded, TrainState
from megatron.errors import NonFiniteError
from megatron.model.parameters import VOCABULARY_TABLES, WORD_TABLE, classic_path, layer_of

Records = dict[str, TensorRecord]


def rank_content(
    state: TrainState, file: str, arguments: Mapping[str, Any], *, tp: int, rng: list[Any] | None
) -> tuple[dict[str, Any], Records, dict[str, Records]]:
    """The content of one `model_optim_rng.pt`, and the records of its model's and its optimizer's tensors.

    `arguments` come from `classic_arguments`; `tp` ranks share the vocabulary.
    """
    padded = arguments.get("padded_vocab_size")
    padded_rows = None if padded is None else int(padded) // tp
    base = min((layer for name in state.params if (layer := layer_of(name)) is not None), default=0)
    model_tensors: dict[tuple[str, ...], Tensor] = {}
    model_records: Records = {}
    for name, (spec, tensor) in state.params.items():
        stored = _snapshot(name, tensor)
        if name in VOCABULARY_TABLES:
            stored = _pad_rows(stored, padded_rows)
        key = ("model", *classic_path(name, base))
        model_tensors[key[1:]] = stored
        model_records[name] = _record((spec, stored), file, key)
    optimizer, optimizer_records = _optimizer(state, file)
    content = {
        "args": classic.attribute_dict(arguments),
        "checkpoint_version": classic.CHECKPOINT_VERSION,
        "iteration": state.iteration,
        "model": classic.nest(model_tensors),
        "optimizer": optimizer,
        "opt_param_scheduler": classic.plain(state.scheduler),
        "rng_state": rng,
        "config": classic.plain(state.config),
        "data": classic.plain(state.data),
        "has_manifest": True,  # without its manifest the checkpoint is incomplete
    }
    return content, model_records, optimizer_records


def classic_arguments(state: TrainState, tp: int) -> dict[str, Any]:
    """`args` as old tools read it: derived from the model's settings, then overridden by what the run gives."""
    derived: dict[str, Any] = {}
    words = state.params.get(WORD_TABLE)
    if "model" in state.config and words is not None:
        derived = classic.model_arguments(model_config(state.config["model"]), words[0].logical_shape[0], tp)
    return {
        **derived,
        **state.args,
        "iteration": state.iteration,
        "consumed_train_samples": state.consumed_train_samples,
        "consumed_valid_samples": state.consumed_valid_samples,
    }


def _optimizer(state: TrainState, file: str) -> tuple[dict[str, Any] | None, dict[str, Records]]:
    if state.optimizer is None:
        return None, {}
    tensors: dict[str, dict[str, Tensor]] = {}
    records: dict[str, Records] = {}
    for name, kinds in state.optimizer.items():
        stored = {kind: (spec, _snapshot(f"{name} ({kind})", tensor)) for kind, (spec, tensor) in kinds.items()}
        tensors[name] = {kind: tensor for kind, (_, tensor) in stored.items()}
        records[name] = {
            kind: _record(sharded, file, ("optimizer", "state", name, kind)) for kind, sharded in stored.items()
        }
    return {"state": tensors, "extra": _plain_or_tensor(state.optimizer_extra)}, records


def _plain_or_tensor(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _plain_or_tensor(item) for key, item in value.items()}
    return classic.plain(value)


def _snapshot(name: str, tensor: Tensor) -> Tensor:
    """A copy on the CPU with its own storage; a view into a flat buffer would be saved with the whole buffer."""
    copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    if copy.is_floating_point() and not bool(torch.isfinite(copy).all()):
        raise NonFiniteError(f"{name} holds NaN or infinite values; no checkpoint is written")
    return copy


def _pad_rows(tensor: Tensor, rows: int | None) -> Tensor:
    if rows is None or rows <= tensor.shape[0]:
        return tensor
    return torch.nn.functional.pad(tensor, (0, 0, 0, rows - tensor.shape[0]))


def _record(sharded: Sharded, file: str, key: tuple[str, ...]) -> TensorRecord:
    spec, tensor = sharded
    piece = Slice(file=file, key=key, ranges=spec.ranges, shape=tuple(tensor.shape))
    shape = tuple(spec.logical_shape)
    return TensorRecord(logical_shape=shape, dtype=str(tensor.dtype), dim=spec.dim, slices=(piece,), fold=spec.fold)


def merge_records(parts: list[Records]) -> Records:
    """Merges the records of all files: one per logical tensor, with all its slices."""
    merged: Records = {}
    for part in parts:
        for name, record in part.items():
            before = merged.get(name, replace(record, slices=()))
            assert replace(before, slices=()) == replace(record, slices=()), name
            merged[name] = replace(record, slices=(*before.slices, *record.slices))
    return merged
