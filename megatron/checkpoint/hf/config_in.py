"""From a Hugging Face config.json to our model settings. What we cannot compute is refused by its name there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.checkpoint.hf.config_out import OWN_KEY
from megatron.checkpoint.hf.family import Family
from megatron.config import ModelConfig, MoEConfig
from megatron.errors import ConfigError

_GELU_NAMES = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh", "gelu": "erf", "relu2": "relu2"}
_ROPE_NAMES = ("default", "linear", "llama3", "yarn")
_MISTRAL_WINDOW = 4096  # where its config.json has none; without a window it says null


def model_config_from(values: Mapping[str, Any], family: Family) -> ModelConfig:
    if values.get("auto_map"):
        raise ConfigError("config.json: auto_map asks for the model's own code to run; that is never done")
    try:
        given = _gpt2(values) if family.style == "gpt2" else _rotary(values, family)
    except KeyError as error:
        raise ConfigError(f"config.json: {error.args[0]} is missing") from error
    own = values.get(OWN_KEY) or {}
    given |= {name: bool(own[name]) for name in ("add_bias_linear", "add_qkv_bias") if name in own}
    given["untie_embeddings_and_output_weights"] = not _tied(values, family)
    given["init_method_std"] = values.get("initializer_range", 0.02)
    return ModelConfig(**given)


def moe_config_from(values: Mapping[str, Any], family: Family) -> MoEConfig:
    """Its experts. The weight of the load-balance loss is training's, and not taken over."""
    try:
        if family.model_type == "mixtral":
            return MoEConfig(num_experts=values["num_local_experts"], moe_router_topk=values["num_experts_per_tok"])
        if family.model_type == "qwen3_moe":
            return _qwen3_experts(values)
    except KeyError as error:
        raise ConfigError(f"config.json: {error.args[0]} is missing") from error
    return MoEConfig()


def _qwen3_experts(values: Mapping[str, Any]) -> MoEConfig:
    layers, step = values["num_hidden_layers"], values.get("decoder_sparse_step", 1)
    dense = set(values.get("mlp_only_layers") or ())
    with_experts = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(layers)]
    return MoEConfig(
        num_experts=values["num_experts"],
        moe_router_topk=values["num_experts_per_tok"],
        moe_router_pre_softmax=not values.get("norm_topk_prob", False),
        moe_ffn_hidden_size=values["moe_intermediate_size"],
        moe_layer_freq="1" if all(with_experts) else f"[{','.join(map(str, with_experts))}]",
    )


def _tied(values: Mapping[str, Any], family: Family) -> bool:
    return bool(values.get("tie_word_embeddings", family.style == "gpt2"))


def _refuse(values: Mapping[str, Any], **expected: Any) -> None:
    for name, usual in expected.items():
        if values.get(name, usual) != usual:
            raise ConfigError(f"config.json: {name} {values[name]!r} is not supported; only {usual!r}")


def _gpt2(values: Mapping[str, Any]) -> dict[str, Any]:
    _refuse(
        values,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        reorder_and_upcast_attn=False,
        add_cross_attention=False,
        embd_pdrop=values.get("resid_pdrop", 0.1),  # one --hidden-dropout serves both
    )
    kind = _GELU_NAMES.get(values.get("activation_function", "gelu_new"))
    if kind is None:
        raise ConfigError(f"config.json: activation_function {values['activation_function']!r} is not supported")
    return {
        "num_layers": values["n_layer"],
        "hidden_size": values["n_embd"],
        "ffn_hidden_size": values.get("n_inner") or 4 * values["n_embd"],
        "num_attention_heads": values["n_head"],
        "max_position_embeddings": values["n_positions"],
        "norm_epsilon": values.get("layer_norm_epsilon", 1e-5),
        "bias_gelu_fusion": kind == "tanh",
        "openai_gelu": kind == "tanh",
        "squared_relu": kind == "relu2",
        "attention_dropout": values.get("attn_pdrop", 0.1),
        "hidden_dropout": values.get("resid_pdrop", 0.1),
    }


def _rotary(values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    _refuse(values, hidden_act="silu", pretraining_tp=1, partial_rotary_factor=1.0)
    heads = values["num_attention_heads"]
    # Left out, it is all heads in Llama and a number of transformers' own elsewhere: not to be guessed.
    groups = (values.get if family.model_type == "llama" else values.__getitem__)("num_key_value_heads") or heads
    return {
        "num_layers": values["num_hidden_layers"],
        "hidden_size": values["hidden_size"],
        "ffn_hidden_size": values["intermediate_size"],
        "num_attention_heads": heads,
        "kv_channels": values.get("head_dim") or _default_head_dim(values, family),
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else None,
        "max_position_embeddings": values["max_position_embeddings"],
        "normalization": "RMSNorm",
        "norm_epsilon": values.get("rms_norm_eps", 1e-6),
        "swiglu": True,
        "qk_layernorm": family.model_type in ("qwen3", "qwen3_moe"),
        "attention_dropout": values.get("attention_dropout", 0.0),
        "hidden_dropout": 0.0,
        "window_size": _window(values, family),
        **_biases(values, family),
        **_rope(values),
    }


def _default_head_dim(values: Mapping[str, Any], family: Family) -> int:
    return 128 if family.model_type == "qwen3" else values["hidden_size"] // values["num_attention_heads"]


def _biases(values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    attention, mlp = bool(values.get("attention_bias", False)), bool(values.get("mlp_bias", False))
    if family.model_type == "qwen2":
        attention, mlp = False, False
    if attention != mlp or (attention and family.model_type != "llama"):
        raise ConfigError(f"config.json: attention_bias {attention} with mlp_bias {mlp} is not supported; both or none")
    return {"add_bias_linear": attention, "add_qkv_bias": family.model_type == "qwen2"}


def _window(values: Mapping[str, Any], family: Family) -> tuple[int, int] | None:
    width = values.get("sliding_window", _MISTRAL_WINDOW if family.model_type == "mistral" else None)
    kinds = set(values.get("layer_types") or [])
    if family.model_type == "llama" or width is None:
        return None
    if family.model_type in ("qwen2", "qwen3", "qwen3_moe"):
        if not values.get("use_sliding_window", False):
            return None
        if family.model_type == "qwen3_moe":
            raise ConfigError("config.json: a sliding window with experts is not supported for qwen3_moe")
        from_layer = values.get("max_window_layers", 28)
        if kinds == {"full_attention"} or (not kinds and from_layer >= values["num_hidden_layers"]):
            return None
        if kinds != {"sliding_attention"} and (kinds or from_layer > 0):
            raise ConfigError("config.json: a sliding window in some layers only is not supported")
    return (int(width) - 1, 0)


def _rope(values: Mapping[str, Any]) -> dict[str, Any]:
    scaling = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = scaling.get("rope_theta", values.get("rope_theta", 10000.0))
    if kind not in _ROPE_NAMES:
        raise ConfigError(f"config.json: rope_type {kind!r} is not supported; there are {', '.join(_ROPE_NAMES)}")
    _refuse(scaling, partial_rotary_factor=1.0, mscale=None, mscale_all_dim=None, truncate=True)
    rope: dict[str, Any] = {
        "position_embedding_type": "yarn" if kind == "yarn" else "rope",
        "rotary_base": float(theta),
    }
    if kind == "linear":
        rope["rotary_seq_len_interpolation_factor"] = scaling["factor"]
    elif kind == "llama3":
        rope |= {
            "use_rope_scaling": True,
            "rope_scaling_factor": scaling["factor"],
            "rope_low_freq_factor": scaling["low_freq_factor"],
            "rope_high_freq_factor": scaling["high_freq_factor"],
            "rope_original_max_position": scaling["original_max_position_embeddings"],
        }
    elif kind == "yarn":
        rope |= {
            "yarn_factor": scaling["factor"],
            "yarn_beta_fast": scaling.get("beta_fast") or 32.0,
            "yarn_beta_slow": scaling.get("beta_slow") or 1.0,
            "yarn_original_max_position_embeddings": scaling["original_max_position_embeddings"],
            "yarn_attention_factor": scaling.get("attention_factor"),
        }
    return rope
