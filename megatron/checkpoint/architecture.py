"""Checks, before anything is allocated, that a checkpoint and this run have the same model."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from megatron.config import ModelConfig, MoEConfig
from megatron.config.run import settings_by_name
from megatron.config.values import check_one
from megatron.errors import CheckpointError
from megatron.utils.typed import typed

# Effective values are compared: an MLP of 4 x hidden is the same model whether the width was given or left unset.
_EFFECTIVE = (
    *("num_layers", "hidden_size", "ffn_size", "num_attention_heads", "head_dim", "query_groups", "activation"),
    *("positions", "rope_scaling", "normalization", "norm_epsilon", "apply_layernorm_1p", "qk_layernorm", "window"),
    *("linear_bias", "qkv_bias", "tied", "apply_residual_connection_post_layernorm", "norm_placement"),
    *("use_parallel_residual", "apply_query_key_layer_scaling"),
)
_EFFECTIVE_MOE = (
    *("num_experts", "moe_router_topk", "moe_router_pre_softmax", "moe_router_score_function"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor"),
    *("moe_router_enable_expert_bias", "moe_expert_capacity_factor", "moe_shared_expert_intermediate_size"),
)
_ROPE = ("rotary_percent", "rotary_base")
_ROPE_SCALING = {
    "none": (),
    "linear": ("rotary_seq_len_interpolation_factor",),
    "llama3": (*("rope_scaling_factor", "rope_low_freq_factor", "rope_high_freq_factor"), "rope_original_max_position"),
    "yarn": (
        *("yarn_factor", "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow"),
        "yarn_attention_factor",
    ),
}
_FLAG = {"ffn_size": "ffn-hidden-size", "head_dim": "kv-channels", "query_groups": "num-query-groups"}
# Settings of the context length, which --finetune may change: they affect no tensor.
CONTEXT = {"rotary_base", "rope_scaling", "window", *(name for names in _ROPE_SCALING.values() for name in names)}


def model_config(values: Any) -> ModelConfig:
    """The model section of a saved configuration."""
    return _section("model has", values, ModelConfig)


def moe_config(saved: Mapping[str, Any]) -> MoEConfig:
    """The MoE section of a saved configuration; older ones have none."""
    values = saved.get("moe") or {}
    if isinstance(values, dict) and not values.get("num_experts"):
        return MoEConfig()
    return _section("experts have", values, MoEConfig)


Section = TypeVar("Section", ModelConfig, MoEConfig)


def _section(what: str, values: Any, section: type[Section]) -> Section:
    """Builds a section and checks its values in the same way as flags, because the file is not trusted."""
    if isinstance(values, Mapping):
        _refuse_unknown(what, values, section)
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    try:
        made = typed(section, values)
        for name in values:
            value, setting = getattr(made, name), settings_by_name()[name]
            for one in value if isinstance(value, tuple) else [value]:
                if one is not None and one != setting.default:
                    check_one(setting, one)
    except ValueError as error:
        raise CheckpointError(f"the checkpoint's {what} an invalid setting: {error}") from None
    return made


def _refuse_unknown(what: str, values: Mapping[str, Any], section: type[ModelConfig | MoEConfig]) -> None:
    unknown = sorted(set(values) - {field.name for field in fields(section)})
    if unknown:
        raise CheckpointError(
            f"the checkpoint's {what} settings unknown to this version: {', '.join(unknown)}; use a newer version"
        )


def architecture(config: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    """Returns the effective settings that define what a model computes, with the MoE settings if it has experts."""
    values = {name: getattr(config, name) for name in _EFFECTIVE}
    if config.positions == "learned":
        values["max_position_embeddings"] = config.max_position_embeddings
    if config.positions == "rope":
        names = (*_ROPE, *_ROPE_SCALING[config.rope_scaling])
        values |= {name: getattr(config, name) for name in names}
    if config.qk_layernorm:
        values["qk_layernorm_scope"] = config.qk_layernorm_scope
    if moe.is_on:
        values |= {name: getattr(moe, name) for name in _EFFECTIVE_MOE}
        values["moe_layer_freq"] = moe.expert_layers(config.num_layers)
        values["moe_ffn_hidden_size"] = moe.moe_ffn_hidden_size or config.ffn_size
        if moe.moe_expert_capacity_factor is not None:
            values["moe_token_drop_policy"] = moe.moe_token_drop_policy
    return values


def differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Maps each field that differs to (value in the checkpoint, value in this run)."""
    names = [*left, *(name for name in right if name not in left)]
    return {name: (left.get(name), right.get(name)) for name in names if left.get(name) != right.get(name)}


def check_architecture(
    saved: Mapping[str, Any], ours: ModelConfig, moe: MoEConfig | None = None, *, finetune: bool = False
) -> list[str]:
    """Raises an error that lists every differing field if the `saved` configuration has another model. Returns the
    changes that --finetune allows."""
    theirs = model_config(saved["model"])
    found = differences(architecture(theirs, moe_config(saved)), architecture(ours, moe or MoEConfig()))
    allowed = {name for name in found if finetune and name in CONTEXT}
    refused = {name: pair for name, pair in found.items() if name not in allowed}
    if refused:
        listed = "; ".join(f"{_flag(name)}: checkpoint {old}, this run {new}" for name, (old, new) in refused.items())
        raise CheckpointError(
            f"the checkpoint has another model ({listed}); give the checkpoint's settings, or another --load"
        )
    return [f"{_flag(name)} changes from {found[name][0]} to {found[name][1]}" for name in sorted(allowed)]


def _flag(name: str) -> str:
    return "--" + _FLAG.get(name, name).replace("_", "-")
