"""Llama, and what the families that descend from it share: RoPE, RMSNorm, gated MLP, no fused weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.checkpoint.hf.exchange import same, separate_gate_and_up, separate_qkv
from megatron.checkpoint.hf.family import Family, Lacking, positions_flag, refuse_unless
from megatron.checkpoint.hf.rope import rope_from_json, rope_to_json
from megatron.config import ModelConfig
from megatron.errors import ConfigError
from megatron.model import parameters as names

LAYER = "model.layers.{layer}"
_ATTENTION = f"{LAYER}.self_attn"
_TENSORS = {
    names.WORDS: same("model.embed_tokens"),
    names.INPUT_NORM: same(f"{LAYER}.input_layernorm"),
    names.QKV: separate_qkv(f"{_ATTENTION}.q_proj", f"{_ATTENTION}.k_proj", f"{_ATTENTION}.v_proj"),
    names.Q_NORM: same(f"{_ATTENTION}.q_norm"),
    names.K_NORM: same(f"{_ATTENTION}.k_norm"),
    names.ATTENTION_OUT: same(f"{_ATTENTION}.o_proj"),
    names.POST_ATTENTION_NORM: same(f"{LAYER}.post_attention_layernorm"),
    f"{names.MLP}.{names.UP}": separate_gate_and_up(f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"),
    f"{names.MLP}.{names.DOWN}": same(f"{LAYER}.mlp.down_proj"),
    names.FINAL_NORM: same("model.norm"),
    names.HEAD: same("lm_head"),
}


class LlamaLike(Family):
    """Llama without the settings in which its descendants differ: biases, sliding window, norms of Q and K, experts."""

    tensors = _TENSORS
    buffers = (".rotary_emb.inv_freq",)
    may_have_biases: bool = False
    default_head_dim: int | None = None  # where config.json has none; None: hidden size / heads

    def lacks(self, c: ModelConfig) -> Lacking:
        activation = "--squared-relu" if c.squared_relu else "GELU"
        return [
            (positions_flag(c), c.positions != "rope"),
            (f"--normalization {c.normalization}", c.normalization != "RMSNorm"),
            (f"{activation} (without --swiglu)", not c.swiglu),
            (f"--rotary-percent {c.rotary_percent}", c.rotary_percent != 1.0),
            (f"--window-size {c.window}", c.window is not None and (c.window[1] != 0 or c.window[0] < 0)),
            ("--apply-residual-connection-post-layernorm", c.apply_residual_connection_post_layernorm),
        ]

    def model_to_json(self, config: ModelConfig, context: int) -> dict[str, Any]:
        return {
            "hidden_size": config.hidden_size,
            "intermediate_size": config.ffn_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.query_groups,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": config.norm_epsilon,
            "max_position_embeddings": context,
            "attention_dropout": config.attention_dropout,
            **rope_to_json(config),
            **self.biases_to_json(config),
            **self.window_to_json(config),
        }

    def model_from_json(self, values: Mapping[str, Any]) -> dict[str, Any]:
        refuse_unless(values, hidden_act="silu", pretraining_tp=1, partial_rotary_factor=1.0)
        heads = values["num_attention_heads"]
        # A missing number has a default that differs between families and versions; null means one for each head.
        groups = values["num_key_value_heads"] or heads
        return {
            "num_layers": values["num_hidden_layers"],
            "hidden_size": values["hidden_size"],
            "ffn_hidden_size": values["intermediate_size"],
            "num_attention_heads": heads,
            "kv_channels": values.get("head_dim") or self.default_head_dim or values["hidden_size"] // heads,
            "group_query_attention": groups != heads,
            "num_query_groups": groups if groups != heads else None,
            "max_position_embeddings": values["max_position_embeddings"],
            "normalization": "RMSNorm",
            "norm_epsilon": values.get("rms_norm_eps", 1e-6),
            "swiglu": True,
            "attention_dropout": values.get("attention_dropout", 0.0),
            "hidden_dropout": 0.0,
            "window_size": self.window_from_json(values),
            **self.biases_from_json(values),
            **rope_from_json(values),
        }

    def biases_to_json(self, config: ModelConfig) -> dict[str, Any]:
        return {}

    def biases_from_json(self, values: Mapping[str, Any]) -> dict[str, bool]:
        attention, mlp = bool(values.get("attention_bias", False)), bool(values.get("mlp_bias", False))
        if attention != mlp or (attention and not self.may_have_biases):
            raise ConfigError(
                f"config.json: attention_bias {attention} with mlp_bias {mlp} is not supported; both or none"
            )
        return {"add_bias_linear": attention}

    def window_to_json(self, config: ModelConfig) -> dict[str, Any]:
        return {}

    def window_from_json(self, values: Mapping[str, Any]) -> tuple[int, int] | None:
        return None


class Llama(LlamaLike):
    architecture = "LlamaForCausalLM"
    model_type = "llama"
    may_have_biases = True

    def lacks(self, c: ModelConfig) -> Lacking:
        return [
            *super().lacks(c),
            ("--qk-layernorm", c.qk_layernorm),
            (f"--window-size {c.window}", c.window is not None),
            ("--add-qkv-bias", c.qkv_bias and not c.linear_bias),
        ]

    def model_from_json(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return super().model_from_json({"num_key_value_heads": None, **values})

    def biases_to_json(self, config: ModelConfig) -> dict[str, Any]:
        return {"attention_bias": config.linear_bias, "mlp_bias": config.linear_bias}


def window_width(config: ModelConfig) -> int | None:
    """Theirs counts the query's own token, ours does not."""
    return None if config.window is None else config.window[0] + 1


def window_of(width: int | None) -> tuple[int, int] | None:
    return None if width is None else (int(width) - 1, 0)
