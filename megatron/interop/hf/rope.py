"""Converts RoPE and its scaling to and from config.json."""

from collections.abc import Mapping
from typing import Any

from megatron.config import ModelConfig
from megatron.errors import ConfigError
from megatron.interop.hf.family import refuse_unless

_SCALING: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "rotary_seq_len_interpolation_factor"},
    "llama3": {
        "factor": "rope_scaling_factor",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
        "original_max_position_embeddings": "rope_original_max_position",
    },
    "yarn": {
        "factor": "yarn_factor",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
        "original_max_position_embeddings": "yarn_original_max_position_embeddings",
        "attention_factor": "yarn_attention_factor",
    },
}
"""Settings of each kind of scaling: name in config.json -> name in ModelConfig."""


def rope_to_json(config: ModelConfig) -> dict[str, Any]:
    scaling = None
    if config.rope_scaling != "none":
        numbers = {theirs: getattr(config, ours) for theirs, ours in _SCALING[config.rope_scaling].items()}
        given = {name: number for name, number in numbers.items() if number is not None}
        scaling = {"rope_type": config.rope_scaling, **given}
    return {"rope_theta": config.rotary_base, "rope_scaling": scaling}


def rope_from_json(values: Mapping[str, Any], *, partial: bool = False) -> dict[str, Any]:
    """Returns arguments of ModelConfig. Newer versions of transformers write `rope_parameters`, older ones
    `rope_scaling`. `partial`: the family may rotate a part of each head."""
    scaling = _described(values)
    share = scaling.pop("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    share = 1.0 if share is None else share
    if share != 1.0 and not partial:
        raise ConfigError(f"config.json: partial_rotary_factor {share!r:.60} is not supported; only 1.0")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = scaling.get("rope_theta", values.get("rope_theta", 10000.0))
    if kind not in _SCALING:
        raise ConfigError(f"config.json: rope_type {kind!r:.60} is not supported; supported: {', '.join(_SCALING)}")
    refuse_unless(scaling, mscale=None, mscale_all_dim=None, truncate=True)
    if "original_max_position_embeddings" in scaling:  # transformers prefers this value to the outer one
        refuse_unless(values, original_max_position_embeddings=scaling["original_max_position_embeddings"])
    elif "original_max_position_embeddings" not in values:  # transformers 5 uses the context length, 4 does not
        scaling["original_max_position_embeddings"] = values.get("max_position_embeddings")
    if kind == "yarn":
        scaling["beta_fast"] = scaling.get("beta_fast") or 32.0
        scaling["beta_slow"] = scaling.get("beta_slow") or 1.0
        scaling.setdefault("attention_factor", None)
    return {
        "position_embedding_type": "yarn" if kind == "yarn" else "rope",
        "rotary_base": float(theta),
        "rotary_percent": float(share),
        "use_rope_scaling": kind == "llama3",
        **{ours: scaling[theirs] for theirs, ours in _SCALING[kind].items()},
    }


def _described(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of RoPE. Raises if there are two that differ: versions of transformers disagree on them."""
    newer, older = (values.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
    if newer and older and newer != older:
        raise ConfigError("config.json: rope_parameters and rope_scaling differ; keep only the right one")
    return dict(newer or older)
