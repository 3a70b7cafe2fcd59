"""Whether the tensors that a manifest lists are those of the model that it describes: all names, all shapes."""

from __future__ import annotations

from math import prod

from megatron.checkpoint import slices
from megatron.checkpoint.architecture import model_config, moe_config
from megatron.checkpoint.manifest import Manifest, TensorRecord
from megatron.errors import MegatronError
from megatron.model.parameters import VOCABULARY_TABLES, WORD_TABLE, parameters

_IN_SHAPE = ("exp_avg", "exp_avg_sq", "master")
"""Kinds of an optimizer's tensors that have the shape of their parameter, if they are in full precision."""
_MOST_LAYERS = 100_000
_SHOWN = 4


def describes_gpt(record: Manifest) -> bool:
    """A script's own model is not described by settings; nor, fully, is one of before there were experts."""
    told = {"model", "moe"} <= set(record.config) and "padded_vocab_size" in record.args
    return told and WORD_TABLE in record.model


def model_problems(record: Manifest) -> list[str]:
    """What contradicts itself, by name."""
    found = [text for name, each in record.model.items() for text in _stored(name, each)]
    for name, kinds in record.optimizer.items():
        for kind, each in kinds.items():
            found += _stored(f"{name} ({kind})", each)
            whole = record.model.get(name)
            in_shape = kind in _IN_SHAPE and each.dtype == "torch.float32"
            if in_shape and whole is not None and each.logical_shape != whole.logical_shape:
                found.append(f"{name} ({kind}) has shape {each.logical_shape}, its parameter {whole.logical_shape}")
    return found + (_against_settings(record) if describes_gpt(record) else [])


def _stored(name: str, record: TensorRecord) -> list[str]:
    """A slice holds as many elements as the indices that it claims, and padding rows if it is of a vocabulary."""
    for piece in record.slices:
        spec = slices.source_spec(name, record, piece)
        held, claimed = prod(piece.shape), prod(spec.local_shape)
        padded = record.dim == 0 and piece.shape[1:] == spec.local_shape[1:] and piece.shape[:1] > spec.local_shape[:1]
        if held != claimed and not (padded and name.partition(" ")[0] in VOCABULARY_TABLES):
            return [f"{name} is stored as {piece.shape} where {spec.local_shape} belongs"]
    return []


def _against_settings(record: Manifest) -> list[str]:
    try:
        config, moe = model_config(record.config["model"]), moe_config(record.config)
        if config.num_layers + len(moe.expert_layers(min(config.num_layers, _MOST_LAYERS))) > _MOST_LAYERS:
            return [f"its settings describe {config.num_layers} layers"]
        wanted = parameters(config, record.model[WORD_TABLE].logical_shape[0], moe)
    except MegatronError as error:
        return [f"its settings describe no model: {error}"]
    missing = [name for name in wanted if name not in record.model]
    extra = [name for name in record.model if name not in wanted]
    other = [
        f"{name} has shape {record.model[name].logical_shape}, the model of its settings has {parameter.shape}"
        for name, parameter in wanted.items()
        if name in record.model and record.model[name].logical_shape != parameter.shape
    ]
    return [
        *other,
        *([f"the model of its settings also has {_some(missing)}"] if missing else []),
        *([f"the model of its settings has no {_some(extra)}"] if extra else []),
    ]


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
