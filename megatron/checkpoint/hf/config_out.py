"""config.json and generation_config.json of an export."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.checkpoint.hf.family import Family
from megatron.config import ModelConfig, MoEConfig

# Settings that a family cannot say and zero biases do. Kept so that an import gives the same model again.
OWN_KEY = "megatron_settings"
_GELU = {"gelu_tanh": "gelu_new", "gelu_erf": "gelu", "squared_relu": "relu2"}


@dataclass(frozen=True)
class Facts:
    """What an export needs to know besides the model's shape."""

    vocab_size: int
    dtype: str  # "float32", "bfloat16", "float16"
    context: int  # positions that the model was trained for
    eod_id: int | None


def config_json(config: ModelConfig, family: Family, facts: Facts, moe: MoEConfig | None = None) -> dict[str, Any]:
    common = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": facts.vocab_size,
        "torch_dtype": facts.dtype,
        "tie_word_embeddings": config.tied,
        "initializer_range": config.init_method_std,
        "use_cache": True,
        "bos_token_id": facts.eod_id,
        "eos_token_id": facts.eod_id,
    }
    specific = _gpt2(config) if family.style == "gpt2" else _rotary(config, family, facts)
    if moe is not None and moe.is_on:
        specific |= _experts(config, family, moe)
    return common | specific | {OWN_KEY: own_settings(config)}


def own_settings(config: ModelConfig) -> dict[str, Any]:
    return {"add_bias_linear": config.add_bias_linear, "add_qkv_bias": config.qkv_bias and not config.linear_bias}


def generation_json(facts: Facts) -> dict[str, Any]:
    return {"bos_token_id": facts.eod_id, "eos_token_id": facts.eod_id, "pad_token_id": facts.eod_id}


def _gpt2(config: ModelConfig) -> dict[str, Any]:
    return {
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_attention_heads,
        "n_inner": config.ffn_size,
        "n_positions": config.max_position_embeddings,
        "n_ctx": config.max_position_embeddings,
        "activation_function": _GELU[config.activation],
        "layer_norm_epsilon": config.norm_epsilon,
        "attn_pdrop": config.attention_dropout,
        "embd_pdrop": config.hidden_dropout,
        "resid_pdrop": config.hidden_dropout,
    }


def _rotary(config: ModelConfig, family: Family, facts: Facts) -> dict[str, Any]:
    values: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.query_groups,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "max_position_embeddings": facts.context,
        "attention_dropout": config.attention_dropout,
        "rope_theta": config.rotary_base,
        "rope_scaling": rope_scaling(config),
    }
    if family.model_type == "llama":
        values |= {"attention_bias": config.linear_bias, "mlp_bias": config.linear_bias}
    if family.model_type in ("qwen3", "qwen3_moe"):
        values |= {"attention_bias": False}
    return values | _window(config, family)


def _experts(config: ModelConfig, family: Family, moe: MoEConfig) -> dict[str, Any]:
    width = moe.moe_ffn_hidden_size or config.ffn_size
    common = {"num_experts_per_tok": moe.moe_router_topk, "router_aux_loss_coef": moe.moe_aux_loss_coeff}
    if family.model_type == "mixtral":
        return common | {"num_local_experts": moe.num_experts, "intermediate_size": width}
    with_experts = moe.expert_layers(config.num_layers)
    return common | {
        "num_experts": moe.num_experts,
        "moe_intermediate_size": width,
        "norm_topk_prob": not moe.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(config.num_layers) if layer not in with_experts],
    }


def _window(config: ModelConfig, family: Family) -> dict[str, Any]:
    width = None if config.window is None else config.window[0] + 1  # theirs counts the own token
    if family.model_type in ("mistral", "mixtral"):
        return {"sliding_window": width}
    if family.model_type not in ("qwen2", "qwen3", "qwen3_moe"):
        return {}
    if width is None:
        return {"use_sliding_window": False, "sliding_window": None}
    return {
        "use_sliding_window": True,
        "sliding_window": width,
        "max_window_layers": 0,
        "layer_types": ["sliding_attention"] * config.num_layers,
    }


def rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    if config.rope_scaling == "linear":
        return {"rope_type": "linear", "factor": config.rotary_seq_len_interpolation_factor}
    if config.rope_scaling == "llama3":
        return {
            "rope_type": "llama3",
            "factor": config.rope_scaling_factor,
            "low_freq_factor": config.rope_low_freq_factor,
            "high_freq_factor": config.rope_high_freq_factor,
            "original_max_position_embeddings": config.rope_original_max_position,
        }
    if config.rope_scaling == "yarn":
        given = {} if config.yarn_attention_factor is None else {"attention_factor": config.yarn_attention_factor}
        return {
            "rope_type": "yarn",
            "factor": config.yarn_factor,
            "beta_fast": config.yarn_beta_fast,
            "beta_slow": config.yarn_beta_slow,
            "original_max_position_embeddings": config.yarn_original_max_position_embeddings,
            **given,
        }
    return None
