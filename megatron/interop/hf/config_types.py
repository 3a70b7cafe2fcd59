"""Checks types and bounds of values in a config.json, before anything is made from them."""

import math
from collections.abc import Mapping
from typing import Any

from megatron.errors import ConfigError

_LAYERS, _WIDTH, _COUNT = 1 << 14, 1 << 24, 1 << 40
_WHOLE = {  # name -> (smallest, largest)
    **dict.fromkeys(("num_hidden_layers", "n_layer"), (1, _LAYERS)),
    **dict.fromkeys(("hidden_size", "n_embd", "intermediate_size", "moe_intermediate_size"), (1, _WIDTH)),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_local_experts", "num_experts"), (1, _WIDTH)),
    **dict.fromkeys(("num_experts_per_tok", "decoder_sparse_step"), (1, _WIDTH)),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions"), (1, (1 << 31) - 1)),
}
_WHOLE_OR_NULL = {
    **dict.fromkeys(("num_key_value_heads", "head_dim", "n_inner"), (1, _WIDTH)),
    "sliding_window": (1, _COUNT),
    "max_window_layers": (0, _COUNT),
}
_NUMBERS = {
    **dict.fromkeys(
        ("rms_norm_eps", "layer_norm_epsilon", "initializer_range", "rope_theta", "layer_norm_eps", "rotary_emb_base"),
        (0.0, 1e30),
    ),
    **dict.fromkeys(
        ("attention_dropout", "hidden_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "rotary_pct"), (0.0, 1.0)
    ),
}
_SWITCHES = (
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "use_sliding_window",
    "norm_topk_prob",
    "use_parallel_residual",
)
_OBJECTS = ("rope_parameters", "rope_scaling", "megatron_settings")
_ROPE = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor")
_ROPE_OR_NULL = ("beta_fast", "beta_slow", "attention_factor", "partial_rotary_factor")


def check_types(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if name in _WHOLE or (name in _WHOLE_OR_NULL and value is not None):
            low, high = (_WHOLE | _WHOLE_OR_NULL)[name]
            _demand(type(value) is int and low <= value <= high, name, value, f"a whole number from {low} to {high}")
        elif name in _NUMBERS:
            _demand(
                _is_number(value, *_NUMBERS[name]), name, value, "a number from {:g} to {:g}".format(*_NUMBERS[name])
            )
        elif name in _SWITCHES:
            _demand(isinstance(value, bool), name, value, "true or false")
        elif name in _OBJECTS:
            _demand(value is None or isinstance(value, dict), name, value, "an object or null")
        elif name in ("layer_types", "mlp_only_layers"):
            kind = str if name == "layer_types" else int
            fits = isinstance(value, list) and len(value) <= _LAYERS and all(type(item) is kind for item in value)
            _demand(value is None or fits, name, value, "a list with at most one entry per layer, or null")
        elif name in ("activation_function", "hidden_act", "model_type"):
            _demand(isinstance(value, str), name, value, "text")
    for name in ("rope_parameters", "rope_scaling"):
        _check_rope(name, values.get(name) or {})


def _check_rope(place: str, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if name in ("rope_type", "type"):
            _demand(isinstance(value, str), f"{place}: {name}", value, "text")
        elif isinstance(value, dict):
            raise ConfigError(
                f"config.json: {place}: {name:.60} has its own RoPE settings; all layers must have the same"
            )
        elif name in _ROPE or name in _ROPE_OR_NULL:
            fits = (value is None and name in _ROPE_OR_NULL) or _is_number(value, 0.0, 1e30)
            _demand(fits and (value != 0 or name != "factor"), f"{place}: {name}", value, "a positive number")
        elif name == "original_max_position_embeddings":
            _demand(type(value) is int and 0 < value < _COUNT, f"{place}: {name}", value, "a positive whole number")


def _is_number(value: Any, low: float, high: float) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and low <= value <= high


def _demand(holds: bool, name: str, value: Any, wanted: str) -> None:
    if not holds:
        shown = f"a number of {value.bit_length()} bits" if type(value) is int and value >> 64 else repr(value)[:60]
        raise ConfigError(f"config.json: {name} is {shown}; it has to be {wanted}")
