"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values, and a window that few of them use."""

from collections.abc import Mapping
from typing import Any

from megatron.config import ModelConfig
from megatron.errors import ConfigError
from megatron.interop.hf.families.llama import LlamaLike, window_of, window_width


class Qwen2(LlamaLike):
    architecture = "Qwen2ForCausalLM"
    model_type = "qwen2"
    has_qkv_bias = True
    rebuilds_tokenizer = True

    def window_to_json(self, config: ModelConfig) -> dict[str, Any]:
        width = window_width(config)
        if width is None:
            return {"use_sliding_window": False, "sliding_window": None}
        return {
            "use_sliding_window": True,
            "sliding_window": width,
            "max_window_layers": 0,
            "layer_types": ["sliding_attention"] * config.num_layers,
        }

    def window_from_json(self, values: Mapping[str, Any]) -> tuple[int, int] | None:
        kinds = set(values.get("layer_types") or [])
        if values.get("sliding_window") is None or not values.get("use_sliding_window", False):
            if kinds - {"full_attention"}:
                raise ConfigError(
                    "config.json: layer_types names layers with a window, but sliding_window sets none; set it, or "
                    "remove layer_types"
                )
            return None
        if not self.may_have_window:
            raise ConfigError(
                f"config.json: a sliding window with experts is not supported for {self.model_type}; choose another "
                "model"
            )
        from_layer = values.get("max_window_layers", 28)
        if kinds == {"full_attention"} or (not kinds and from_layer >= values["num_hidden_layers"]):
            return None
        if kinds != {"sliding_attention"} and (kinds or from_layer > 0):
            raise ConfigError(
                "config.json: a sliding window in some layers only is not supported; choose another model"
            )
        return window_of(values["sliding_window"])
