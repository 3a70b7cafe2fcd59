"""OLMo-2: Llama with norms after attention and MLP, and one norm over all heads of queries and one of keys."""

from collections.abc import Mapping
from typing import Any

from megatron.config import ModelConfig
from megatron.interop.hf.exchange import same
from megatron.interop.hf.families.llama import LAYER, LlamaLike
from megatron.model import parameters as names

_BEFORE = (names.INPUT_NORM, names.POST_ATTENTION_NORM)


class Olmo2(LlamaLike):
    architecture = "Olmo2ForCausalLM"
    model_type = "olmo2"
    tensors = {  # noqa: RUF012
        **{ours: theirs for ours, theirs in LlamaLike.tensors.items() if ours not in _BEFORE},
        names.ATTENTION_OUTPUT_NORM: same(f"{LAYER}.post_attention_layernorm"),
        names.MLP_OUTPUT_NORM: same(f"{LAYER}.post_feedforward_layernorm"),
    }
    normalizes_qk = True
    norms_span = "all"
    norm_placement = "after"
    may_have_window = False
    bias_keys = ("attention_bias",)

    def model_to_json(self, config: ModelConfig, context: int) -> dict[str, Any]:
        values = super().model_to_json(config, context)
        if config.rope_scaling == "linear":  # version 4 of transformers takes only these two keys here
            values["rope_scaling"] = {"type": "linear", "factor": float(values["rope_scaling"]["factor"])}
        return values

    def model_from_json(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return super().model_from_json({"num_key_value_heads": None, "rms_norm_eps": 1e-5, **values})
