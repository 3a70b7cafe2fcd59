"""Qwen3-MoE: Qwen3 with experts in all layers or in some."""

from collections.abc import Mapping
from typing import Any

from megatron.config import ModelConfig, MoEConfig
from megatron.interop.hf.families.llama import LAYER
from megatron.interop.hf.families.qwen3 import Qwen3
from megatron.interop.hf.families.routed import balance_coefficient, experts, softmax_routing_lacks
from megatron.interop.hf.family import Lacking


class Qwen3MoE(Qwen3):
    architecture = "Qwen3MoeForCausalLM"
    model_type = "qwen3_moe"
    may_have_window = False
    default_head_dim = None
    tensors = Qwen3.tensors | experts(f"{LAYER}.mlp", gate="gate_proj", up="up_proj", down="down_proj")

    def lacks_of_experts(self, c: ModelConfig, moe: MoEConfig) -> Lacking:
        return softmax_routing_lacks(moe)

    def experts_to_json(self, config: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
        with_experts = moe.expert_layers(config.num_layers)
        return {
            "num_experts_per_tok": moe.moe_router_topk,
            "router_aux_loss_coef": balance_coefficient(config, moe),
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
            num_experts=values.get("num_local_experts") or values["num_experts"],  # transformers 5 and 4
            moe_router_topk=values["num_experts_per_tok"],
            moe_router_pre_softmax=not values.get("norm_topk_prob", False),
            moe_ffn_hidden_size=values["moe_intermediate_size"],
            moe_layer_freq="1" if all(with_experts) else f"[{','.join(map(str, with_experts))}]",
        )
