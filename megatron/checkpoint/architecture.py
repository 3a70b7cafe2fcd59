"""Whether a checkpoint is of the model that is about to be built, before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron.config import ModelConfig
from megatron.errors import CheckpointError

# What a field means decides, not how it was spelled: 4 x hidden given or left unset is the same model.
_MEANINGS = (
    "num_layers",
    "hidden_size",
    "ffn_size",
    "num_attention_heads",
    "head_dim",
    "query_groups",
    "activation",
    "positions",
    "rope_scaling",
    "normalization",
    "norm_epsilon",
    "apply_layernorm_1p",
    "qk_layernorm",
    "window",
    "linear_bias",
    "qkv_bias",
    "tied",
    "apply_residual_connection_post_layernorm",
    "apply_query_key_layer_scaling",
)
_ROPE = ("rotary_percent", "rotary_base")
_ROPE_SCALING = {
    "none": (),
    "linear": ("rotary_seq_len_interpolation_factor",),
    "llama3": (
        "rope_scaling_factor",
        "rope_low_freq_factor",
        "rope_high_freq_factor",
        "rope_original_max_position",
    ),
    "yarn": (
        "yarn_factor",
        "yarn_original_max_position_embeddings",
        "yarn_beta_fast",
        "yarn_beta_slow",
        "yarn_attention_factor",
    ),
}
_FLAG = {"ffn_size": "ffn-hidden-size", "head_dim": "kv-channels", "query_groups": "num-query-groups"}
# What a longer context changes on purpose: tensors stay as they are, so --finetune may.
CONTEXT = {"rotary_base", "rope_scaling", "window", *(name for names in _ROPE_SCALING.values() for name in names)}


def model_config(values: Mapping[str, Any]) -> ModelConfig:
    """The model section of a saved config, as the section itself."""
    known = {field.name for field in fields(ModelConfig)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise CheckpointError(
            f"the checkpoint's model has settings unknown to this version: {', '.join(unknown)}; use a newer one"
        )
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return ModelConfig(**given)


def meaning(config: ModelConfig) -> dict[str, Any]:
    """What decides the function that a model computes."""
    values = {name: getattr(config, name) for name in _MEANINGS}
    if config.positions == "learned":
        values["max_position_embeddings"] = config.max_position_embeddings
    if config.positions == "rope":
        names = (*_ROPE, *_ROPE_SCALING[config.rope_scaling])
        values |= {name: getattr(config, name) for name in names}
    return values


def differences(saved: ModelConfig, ours: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """field -> (in the checkpoint, in this run), for all that differ."""
    left, right = meaning(saved), meaning(ours)
    names = [*left, *(name for name in right if name not in left)]
    return {name: (left.get(name), right.get(name)) for name in names if left.get(name) != right.get(name)}


def check_architecture(saved: Mapping[str, Any], ours: ModelConfig, *, finetune: bool = False) -> list[str]:
    """Refuse another model, listing every field; returns what a --finetune may change and did."""
    found = differences(model_config(saved), ours)
    allowed = {name for name in found if finetune and name in CONTEXT}
    refused = {name: pair for name, pair in found.items() if name not in allowed}
    if refused:
        listed = "; ".join(f"{_flag(name)}: checkpoint {old}, this run {new}" for name, (old, new) in refused.items())
        raise CheckpointError(
            f"the checkpoint is of another model ({listed}); give the same settings, or another --load"
        )
    return [f"{_flag(name)} changes from {found[name][0]} to {found[name][1]}" for name in sorted(allowed)]


def _flag(name: str) -> str:
    return "--" + _FLAG.get(name, name).replace("_", "-")
