"""Mistral, which is Llama without biases and with a sliding window, and Mixtral, which adds experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.checkpoint.hf.exchange import same, separate_gate_and_up
from megatron.checkpoint.hf.families.llama import LAYER, LlamaLike, window_of, window_width
from megatron.checkpoint.hf.family import Lacking, softmax_routing_lacks
from megatron.config import ModelConfig, MoEConfig
from megatron.model import parameters as names


class Mistral(LlamaLike):
    architecture = "MistralForCausalLM"
    model_type = "mistral"
    default_window: int | None = 4096  # where config.json has none; without a window it says null

    def lacks(self, c: ModelConfig) -> Lacking:
        return [
            *super().lacks(c),
            ("--qk-layernorm", c.qk_layernorm),
            ("biases (without --disable-bias-linear)", c.linear_bias),
            ("--add-qkv-bias", c.qkv_bias),
        ]

    def window_to_json(self, config: ModelConfig) -> dict[str, Any]:
        return {"sliding_window": window_width(config)}

    def window_from_json(self, values: Mapping[str, Any]) -> tuple[int, int] | None:
        return window_of(values.get("sliding_window", self.default_window))


_MOE = f"{LAYER}.block_sparse_moe"
_EXPERT = _MOE + ".experts.{expert}"


class Mixtral(Mistral):
    """Experts in every layer, weighted by a softmax over those that a token uses."""

    architecture = "MixtralForCausalLM"
    model_type = "mixtral"
    default_window = None
    tensors = Mistral.tensors | {
        names.ROUTER: same(f"{_MOE}.gate"),
        f"{names.EXPERT}.{names.UP}": separate_gate_and_up(f"{_EXPERT}.w1", f"{_EXPERT}.w3"),
        f"{names.EXPERT}.{names.DOWN}": same(f"{_EXPERT}.w2"),
    }

    def lacks_of_experts(self, c: ModelConfig, moe: MoEConfig) -> Lacking:
        dense_layers = moe.is_on and len(moe.expert_layers(c.num_layers)) < c.num_layers
        return [
            *softmax_routing_lacks(moe),
            ("--moe-router-pre-softmax", moe.moe_router_pre_softmax),
            (f"--moe-layer-freq {moe.moe_layer_freq}", dense_layers),
        ]

    def experts_to_json(self, config: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
        return {
            "num_experts_per_tok": moe.moe_router_topk,
            "router_aux_loss_coef": moe.moe_aux_loss_coeff,
            "num_local_experts": moe.num_experts,
            "intermediate_size": moe.moe_ffn_hidden_size or config.ffn_size,
        }

    def experts_from_json(self, values: Mapping[str, Any]) -> MoEConfig:
        return MoEConfig(num_experts=values["num_local_experts"], moe_router_topk=values["num_experts_per_tok"])
