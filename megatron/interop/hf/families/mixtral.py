"""Mixtral: Mistral with experts in every layer, weighted by a softmax over those that a token uses."""

from collections.abc import Mapping
from typing import Any

from megatron.config import ModelConfig, MoEConfig
from megatron.interop.hf.families.llama import LAYER
from megatron.interop.hf.families.mistral import Mistral
from megatron.interop.hf.families.routed import balance_coefficient, experts, softmax_routing_lacks
from megatron.interop.hf.family import Lacking, refuse_unless


class Mixtral(Mistral):
    architecture = "MixtralForCausalLM"
    model_type = "mixtral"
    default_window = None
    tensors = Mistral.tensors | experts(f"{LAYER}.block_sparse_moe", gate="w1", up="w3", down="w2")

    def model_from_json(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return super().model_from_json({"rms_norm_eps": 1e-5, "rope_theta": 1e6, **values})

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
            "router_aux_loss_coef": balance_coefficient(config, moe),
            "num_local_experts": moe.num_experts,
            "intermediate_size": moe.moe_ffn_hidden_size or config.ffn_size,
        }

    def experts_from_json(self, values: Mapping[str, Any]) -> MoEConfig:
        refuse_unless(values, router_jitter_noise=0.0)  # noise on the router's input in training
        return MoEConfig(num_experts=values["num_local_experts"], moe_router_topk=values["num_experts_per_tok"])
