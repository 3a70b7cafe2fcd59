"""Which class of `transformers` computes the same function, and its config.json. A shape that none has is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from megatron.config import ModelConfig
from megatron.errors import ConfigError

Style = Literal["gpt2", "llama"]  # how tensors are named and laid out


@dataclass(frozen=True)
class Family:
    architecture: str
    model_type: str
    style: Style
    unsupported: Callable[[ModelConfig], str | None]  # the setting that this family lacks

    def expresses(self, config: ModelConfig) -> bool:
        return self.unsupported(config) is None


def choose(config: ModelConfig) -> Family:
    """The simplest family that computes what `config` describes."""
    for family in FAMILIES:
        if family.expresses(config):
            return family
    nearest = _GPT2 if config.positions == "learned" else _nearest_rotary(config)
    raise ConfigError(
        f"{nearest.unsupported(config)}: no Hugging Face model of the GPT-2, Llama, Qwen or Mistral families computes "
        f"this (nearest: {nearest.architecture}); the checkpoint can be used with tools/generate.py, not exported"
    )


def _nearest_rotary(config: ModelConfig) -> Family:
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


_GPT2 = Family("GPT2LMHeadModel", "gpt2", "gpt2", _gpt2_lacks)
_LLAMA = Family("LlamaForCausalLM", "llama", "llama", _llama_lacks)
_MISTRAL = Family("MistralForCausalLM", "mistral", "llama", _mistral_lacks)
_QWEN2 = Family("Qwen2ForCausalLM", "qwen2", "llama", _qwen2_lacks)
_QWEN3 = Family("Qwen3ForCausalLM", "qwen3", "llama", _qwen3_lacks)
FAMILIES = (_GPT2, _LLAMA, _QWEN2, _QWEN3, _MISTRAL)


def by_model_type(model_type: Any) -> Family:
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    known = ", ".join(family.model_type for family in FAMILIES)
    raise ConfigError(f"config.json: model_type {model_type!r} cannot be imported; supported: {known}")
