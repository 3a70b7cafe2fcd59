"""RoPE and its scaling, to and from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.checkpoint.hf.family import refuse_unless
from megatron.config import ModelConfig
from megatron.errors import ConfigError

_KINDS = ("default", "linear", "llama3", "yarn")


def rope_to_json(config: ModelConfig) -> dict[str, Any]:
    return {"rope_theta": config.rotary_base, "rope_scaling": _scaling_to_json(config)}


def _scaling_to_json(config: ModelConfig) -> dict[str, Any] | None:
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


def rope_from_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ModelConfig. Newer versions of transformers write `rope_parameters`, older ones `rope_scaling`."""
    scaling = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = scaling.get("rope_theta", values.get("rope_theta", 10000.0))
    if kind not in _KINDS:
        raise ConfigError(f"config.json: rope_type {kind!r} is not supported; there are {', '.join(_KINDS)}")
    refuse_unless(scaling, partial_rotary_factor=1.0, mscale=None, mscale_all_dim=None, truncate=True)
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
