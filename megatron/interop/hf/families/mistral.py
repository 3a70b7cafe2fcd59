"""Mistral: Llama with a sliding window."""

from collections.abc import Mapping
from typing import Any, ClassVar

from megatron.config import ModelConfig
from megatron.interop.hf.families.llama import LlamaLike, window_of, window_width


class Mistral(LlamaLike):
    architecture = "MistralForCausalLM"
    model_type = "mistral"
    default_window: ClassVar[int | None] = 4096
    """Window if config.json has no key for it; null there means no window."""

    def window_to_json(self, config: ModelConfig) -> dict[str, Any]:
        return {"sliding_window": window_width(config)}

    def window_from_json(self, values: Mapping[str, Any]) -> tuple[int, int] | None:
        return window_of(values.get("sliding_window", self.default_window))
