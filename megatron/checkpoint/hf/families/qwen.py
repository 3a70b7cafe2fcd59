"""Qwen2, which is Llama with biases of Q, K and V; Qwen3, which has norms of Q and K in their place; Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.checkpoint.hf.exchange import same, separate_gate_and_up
from megatron.checkpoint.hf.families.llama import LAYER, LlamaLike, window_of, window_width
from megatron.checkpoint.hf.family import Lacking, softmax_routing_lacks
from megatron.config import ModelConfig, MoEConfig
from megatron.errors import ConfigError
from megatron.model import parameters as names


class Qwen(LlamaLike):
    """What Qwen2 and Qwen3 share: how config.json describes the window."""

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
        if not _switches_window_on(values):
            return None
        kinds = set(values.get("layer_types") or [])
        from_layer = values.get("max_window_layers", 28)
        if kinds == {"full_attention"} or (not kinds and from_layer >= values["num_hidden_layers"]):
            return None
        if kinds != {"sliding_attention"} and (kinds or from_layer > 0):
            raise ConfigError("config.json: a sliding window in some layers only is not supported")
        return window_of(values["sliding_window"])


class Qwen2(Qwen):
    architecture = "Qwen2ForCausalLM"
    model_type = "qwen2"

    def lacks(self, c: ModelConfig) -> Lacking:
        return [
            *super().lacks(c),
            ("--qk-layernorm", c.qk_layernorm),
            ("biases (without --disable-bias-linear)", c.linear_bias),
            ("no QKV bias (without --add-qkv-bias)", not c.qkv_bias),
        ]

    def biases_from_json(self, values: Mapping[str, Any]) -> dict[str, bool]:
        return {"add_bias_linear": False, "add_qkv_bias": True}  # config.json has no say in it


class Qwen3(Qwen):
    architecture = "Qwen3ForCausalLM"
    model_type = "qwen3"
    default_head_dim: int | None = 128

    def lacks(self, c: ModelConfig) -> Lacking:
        return [
            *super().lacks(c),
            ("--qk-layernorm with biases (without --disable-bias-linear)", c.linear_bias),
            ("--qk-layernorm with --add-qkv-bias", c.qkv_bias),
            ("no --qk-layernorm", not c.qk_layernorm),
        ]

    def model_from_json(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return super().model_from_json(values) | {"qk_layernorm": True}

    def biases_to_json(self, config: ModelConfig) -> dict[str, Any]:
        return {"attention_bias": False}


_EXPERT = LAYER + ".mlp.experts.{expert}"


class Qwen3MoE(Qwen3):
    """Experts in all layers or in some."""

    architecture = "Qwen3MoeForCausalLM"
    model_type = "qwen3_moe"
    default_head_dim = None
    tensors = Qwen3.tensors | {
        names.ROUTER: same(f"{LAYER}.mlp.gate"),
        f"{names.EXPERT}.{names.UP}": separate_gate_and_up(f"{_EXPERT}.gate_proj", f"{_EXPERT}.up_proj"),
        f"{names.EXPERT}.{names.DOWN}": same(f"{_EXPERT}.down_proj"),
    }

    def lacks(self, c: ModelConfig) -> Lacking:
        return [*super().lacks(c), (f"--window-size {c.window}", c.window is not None)]

    def lacks_of_experts(self, c: ModelConfig, moe: MoEConfig) -> Lacking:
        return softmax_routing_lacks(moe)

    def window_from_json(self, values: Mapping[str, Any]) -> tuple[int, int] | None:
        if _switches_window_on(values):
            raise ConfigError("config.json: a sliding window with experts is not supported for qwen3_moe")
        return None

    def experts_to_json(self, config: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
        with_experts = moe.expert_layers(config.num_layers)
        return {
            "num_experts_per_tok": moe.moe_router_topk,
            "router_aux_loss_coef": moe.moe_aux_loss_coeff,
            "num_experts": moe.num_experts,
            "moe_intermediate_size": moe.moe_ffn_hidden_size or config.ffn_size,
            "norm_topk_prob": not moe.moe_router_pre_softmax,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [layer for layer in range(config.num_layers) if layer not in with_experts],
        }

    def experts_from_json(self, values: Mapping[str, Any]) -> MoEConfig:
        layers, step = values["num_hidden_layers"], values.get("decoder_sparse_step", 1)
        dense = set(values.get("mlp_only_layers") or ())
        with_experts = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(layers)]
        return MoEConfig(
            num_experts=values["num_experts"],
            moe_router_topk=values["num_experts_per_tok"],
            moe_router_pre_softmax=not values.get("norm_topk_prob", False),
            moe_ffn_hidden_size=values["moe_intermediate_size"],
            moe_layer_freq="1" if all(with_experts) else f"[{','.join(map(str, with_experts))}]",
        )


def _switches_window_on(values: Mapping[str, Any]) -> bool:
    return values.get("sliding_window") is not None and bool(values.get("use_sliding_window", False))
