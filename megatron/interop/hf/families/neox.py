"""GPT-NeoX and Pythia: partial RoPE, LayerNorm, GELU, biases, parallel attention and MLP, an untied head."""

from collections.abc import Mapping
from typing import Any

from megatron.config import ModelConfig
from megatron.interop.hf.exchange import same
from megatron.interop.hf.families.gelu import gelu_from_json, gelu_to_json
from megatron.interop.hf.family import (
    Family,
    Lacking,
    beyond_plain_layers,
    other_wirings,
    positions_flag,
    refuse_unless,
)
from megatron.interop.hf.rope import rope_from_json, rope_to_json
from megatron.model import parameters as names

_LAYER = "gpt_neox.layers.{layer}"


class GPTNeoX(Family):
    architecture = "GPTNeoXForCausalLM"
    model_type = "gpt_neox"
    tensors = {  # noqa: RUF012
        names.WORDS: same("gpt_neox.embed_in"),
        names.INPUT_NORM: same(f"{_LAYER}.input_layernorm"),
        names.QKV: same(f"{_LAYER}.attention.query_key_value"),  # [query; key; value] per head, as ours
        names.ATTENTION_OUT: same(f"{_LAYER}.attention.dense"),
        names.POST_ATTENTION_NORM: same(f"{_LAYER}.post_attention_layernorm"),
        f"{names.MLP}.{names.UP}": same(f"{_LAYER}.mlp.dense_h_to_4h"),
        f"{names.MLP}.{names.DOWN}": same(f"{_LAYER}.mlp.dense_4h_to_h"),
        names.FINAL_NORM: same("gpt_neox.final_layer_norm"),
        names.HEAD: same("embed_out"),
    }
    buffers = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
    always_biased = True

    def lacks(self, c: ModelConfig) -> Lacking:
        return [
            (positions_flag(c), c.positions != "rope"),
            *beyond_plain_layers(c),
            *other_wirings(c, parallel=True),
        ]

    def model_to_json(self, config: ModelConfig, context: int) -> dict[str, Any]:
        rope = rope_to_json(config)
        return {
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_attention_heads,
            "intermediate_size": config.ffn_size,
            "hidden_act": gelu_to_json(config),
            "layer_norm_eps": config.norm_epsilon,
            "max_position_embeddings": context,
            "attention_dropout": config.attention_dropout,
            "hidden_dropout": config.hidden_dropout,
            "use_parallel_residual": config.use_parallel_residual,
            "attention_bias": True,
            "rotary_pct": config.rotary_percent,
            "rotary_emb_base": rope["rope_theta"],
            "rope_scaling": rope["rope_scaling"],
        }

    def model_from_json(self, values: Mapping[str, Any]) -> dict[str, Any]:
        older = {"partial_rotary_factor": values.get("rotary_pct", 0.25)}
        older["rope_theta"] = values.get("rotary_emb_base", 10000.0)
        width = values["hidden_size"] // values["num_attention_heads"]
        # The importer reads these keys nowhere else, so it accepts only the values that it assumes.
        refuse_unless(values, attention_bias=True, head_dim=width, **older)
        return {
            "num_layers": values["num_hidden_layers"],
            "hidden_size": values["hidden_size"],
            "ffn_hidden_size": values["intermediate_size"],
            "num_attention_heads": values["num_attention_heads"],
            "max_position_embeddings": values["max_position_embeddings"],
            "norm_epsilon": values.get("layer_norm_eps", 1e-5),
            "use_parallel_residual": values.get("use_parallel_residual", True),
            "attention_dropout": values.get("attention_dropout", 0.0),
            "hidden_dropout": values.get("hidden_dropout", 0.0),
            **gelu_from_json("hidden_act", values.get("hidden_act", "gelu")),
            **rope_from_json({**older, **values}, partial=True),
        }
