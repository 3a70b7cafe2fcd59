"""Activation of an MLP without a gate, by its names in config.json."""

from typing import Any

from megatron.config import ModelConfig
from megatron.errors import ConfigError

_THEIRS = {"gelu_tanh": "gelu_new", "gelu_erf": "gelu", "squared_relu": "relu2"}
_OURS = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh", "gelu": "erf", "relu2": "relu2"}


def gelu_to_json(config: ModelConfig) -> str:
    return _THEIRS[config.activation]


def gelu_from_json(place: str, name: str) -> dict[str, Any]:
    """Returns arguments of ModelConfig; `place` is the name of the setting in config.json."""
    kind = _OURS.get(name)
    if kind is None:
        raise ConfigError(f"config.json: {place} {name!r:.60} is not supported; supported: {', '.join(_OURS)}")
    return {
        "bias_gelu_fusion": kind == "tanh",
        "openai_gelu": kind == "tanh",
        "squared_relu": kind == "relu2",
    }
