"""Which class of `transformers` computes the same function, and its config.json. A shape that none has is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from megatron.config import ModelConfig, MoEConfig
from megatron.errors import ConfigError

Style = Literal["gpt2", "llama", "mixtral", "qwen3_moe"]  # how tensors are named and laid out


@dataclass(frozen=True)
class Family:
    architecture: str
    model_type: str
    style: Style
    lacks: Callable[[ModelConfig], str | None]  # the setting that this family lacks
    lacks_of_experts: Callable[[ModelConfig, MoEConfig], str | None]

    def unsupported(self, config: ModelConfig, moe: MoEConfig) -> str | None:
        return self.lacks_of_experts(config, moe) or self.lacks(config)


def choose(config: ModelConfig, moe: MoEConfig | None = None) -> Family:
    """The simplest family that computes what `config` describes."""
    moe = moe or MoEConfig()
    for family in FAMILIES:
        if family.unsupported(config, moe) is None:
            return family
    nearest = _nearest_with_experts(config) if moe.is_on else _nearest_dense(config)
    raise ConfigError(
        f"{nearest.unsupported(config, moe)}: no Hugging Face model of the GPT-2, Llama, Qwen, Mistral or Mixtral "
        f"families computes this (nearest: {nearest.architecture}); the checkpoint can be used with "
        "tools/generate.py, not exported"
    )


def _nearest_with_experts(config: ModelConfig) -> Family:
    return _QWEN3_MOE if config.qk_layernorm else _MIXTRAL


def _nearest_dense(config: ModelConfig) -> Family:
    if config.positions == "learned":
        return _GPT2
    if config.qk_layernorm:
        return _QWEN3
    if config.window is not None:
        return _MISTRAL
    return _LLAMA


def _gpt2_lacks(c: ModelConfig) -> str | None:
    lacking = {
        _positions(c): c.positions != "learned",
        f"--normalization {c.normalization}": c.normalization != "LayerNorm",
        "--swiglu": c.swiglu,
        f"--num-query-groups {c.query_groups}": c.query_groups != c.num_attention_heads,
        f"--kv-channels {c.head_dim}": c.head_dim * c.num_attention_heads != c.hidden_size,
        "--qk-layernorm": c.qk_layernorm,
        f"--window-size {c.window}": c.window is not None,
    }
    return _first(lacking) or _no_family_has(c)


def _rotary_lacks(c: ModelConfig) -> str | None:
    lacking = {
        _positions(c): c.positions != "rope",
        f"--normalization {c.normalization}": c.normalization != "RMSNorm",
        f"{_activation(c)} (without --swiglu)": not c.swiglu,
        f"--rotary-percent {c.rotary_percent}": c.rotary_percent != 1.0,
        f"--window-size {c.window}": c.window is not None and (c.window[1] != 0 or c.window[0] < 0),
    }
    return _first(lacking) or _no_family_has(c)


def _llama_lacks(c: ModelConfig) -> str | None:
    lacking = {
        "--qk-layernorm": c.qk_layernorm,
        f"--window-size {c.window}": c.window is not None,
        "--add-qkv-bias": c.qkv_bias and not c.linear_bias,
    }
    return _rotary_lacks(c) or _first(lacking)


def _mistral_lacks(c: ModelConfig) -> str | None:
    lacking = {
        "--qk-layernorm": c.qk_layernorm,
        "biases (without --disable-bias-linear)": c.linear_bias,
        "--add-qkv-bias": c.qkv_bias,
    }
    return _rotary_lacks(c) or _first(lacking)


def _qwen2_lacks(c: ModelConfig) -> str | None:
    lacking = {
        "--qk-layernorm": c.qk_layernorm,
        "biases (without --disable-bias-linear)": c.linear_bias,
        "no QKV bias (without --add-qkv-bias)": not c.qkv_bias,
    }
    return _rotary_lacks(c) or _first(lacking)


def _qwen3_lacks(c: ModelConfig) -> str | None:
    lacking = {
        "--qk-layernorm with biases (without --disable-bias-linear)": c.linear_bias,
        "--qk-layernorm with --add-qkv-bias": c.qkv_bias,
        "no --qk-layernorm": not c.qk_layernorm,
    }
    return _rotary_lacks(c) or _first(lacking)


def _qwen3_moe_lacks(c: ModelConfig) -> str | None:
    return _qwen3_lacks(c) or _first({f"--window-size {c.window}": c.window is not None})


def _no_experts(c: ModelConfig, moe: MoEConfig) -> str | None:
    return _first({f"--num-experts {moe.num_experts}": moe.is_on})


def _experts_lack(moe: MoEConfig) -> str | None:
    lacking = {
        "no --num-experts": not moe.is_on,
        f"--moe-router-score-function {moe.moe_router_score_function}": moe.moe_router_score_function != "softmax",
        "--moe-router-topk-scaling-factor": moe.moe_router_topk_scaling_factor is not None,
        f"--moe-router-num-groups {moe.moe_router_num_groups}": moe.moe_router_num_groups is not None,
        f"--moe-expert-capacity-factor {moe.moe_expert_capacity_factor}": moe.moe_expert_capacity_factor is not None,
        "--moe-shared-expert-intermediate-size": moe.moe_shared_expert_intermediate_size is not None,
    }
    return _first(lacking)


def _mixtral_experts_lack(c: ModelConfig, moe: MoEConfig) -> str | None:
    some = moe.is_on and len(moe.expert_layers(c.num_layers)) < c.num_layers
    lacking = {
        "--moe-router-pre-softmax": moe.moe_router_pre_softmax,
        f"--moe-layer-freq {moe.moe_layer_freq}": some,
    }
    return _experts_lack(moe) or _first(lacking)


def _qwen3_experts_lack(_: ModelConfig, moe: MoEConfig) -> str | None:
    return _experts_lack(moe)


def _no_family_has(c: ModelConfig) -> str | None:
    return "--apply-residual-connection-post-layernorm" if c.apply_residual_connection_post_layernorm else None


def _first(lacking: dict[str, bool]) -> str | None:
    return next((setting for setting, lacks in lacking.items() if lacks), None)


def _positions(c: ModelConfig) -> str:
    if c.positions == "none":
        return "--position-embedding-type none"
    return f"--position-embedding-type {'rope' if c.positions == 'rope' else 'learned_absolute'}"


def _activation(c: ModelConfig) -> str:
    return "--squared-relu" if c.squared_relu else "GELU"


_GPT2 = Family("GPT2LMHeadModel", "gpt2", "gpt2", _gpt2_lacks, _no_experts)
_LLAMA = Family("LlamaForCausalLM", "llama", "llama", _llama_lacks, _no_experts)
_MISTRAL = Family("MistralForCausalLM", "mistral", "llama", _mistral_lacks, _no_experts)
_QWEN2 = Family("Qwen2ForCausalLM", "qwen2", "llama", _qwen2_lacks, _no_experts)
_QWEN3 = Family("Qwen3ForCausalLM", "qwen3", "llama", _qwen3_lacks, _no_experts)
_MIXTRAL = Family("MixtralForCausalLM", "mixtral", "mixtral", _mistral_lacks, _mixtral_experts_lack)
_QWEN3_MOE = Family("Qwen3MoeForCausalLM", "qwen3_moe", "qwen3_moe", _qwen3_moe_lacks, _qwen3_experts_lack)
FAMILIES = (_GPT2, _LLAMA, _QWEN2, _QWEN3, _MISTRAL, _MIXTRAL, _QWEN3_MOE)


def by_model_type(model_type: Any) -> Family:
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    known = ", ".join(family.model_type for family in FAMILIES)
    raise ConfigError(f"config.json: model_type {model_type!r} cannot be imported; supported: {known}")
