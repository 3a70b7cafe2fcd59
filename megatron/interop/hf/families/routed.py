"""Experts that a softmax chooses, as Mixtral and Qwen3-MoE have them."""

from megatron.config import ModelConfig, MoEConfig
from megatron.interop.hf.exchange import TensorLayout, same, separate_gate_and_up
from megatron.interop.hf.family import Lacking
from megatron.model import parameters as names


def experts(module: str, gate: str, up: str, down: str) -> dict[str, TensorLayout]:
    expert = module + ".experts.{expert}"
    return {
        names.ROUTER: same(f"{module}.gate"),
        f"{names.EXPERT}.{names.UP}": separate_gate_and_up(f"{expert}.{gate}", f"{expert}.{up}"),
        f"{names.EXPERT}.{names.DOWN}": same(f"{expert}.{down}"),
    }


def softmax_routing_lacks(moe: MoEConfig) -> Lacking:
    """Lists settings that a family cannot express if a plain softmax chooses its experts."""
    return [
        ("no --num-experts", not moe.is_on),
        (f"--moe-router-score-function {moe.moe_router_score_function}", moe.moe_router_score_function != "softmax"),
        ("--moe-router-topk-scaling-factor", moe.moe_router_topk_scaling_factor is not None),
        (f"--moe-router-num-groups {moe.moe_router_num_groups}", moe.moe_router_num_groups is not None),
        (f"--moe-expert-capacity-factor {moe.moe_expert_capacity_factor}", moe.moe_expert_capacity_factor is not None),
        ("--moe-shared-expert-intermediate-size", moe.moe_shared_expert_intermediate_size is not None),
    ]


def balance_coefficient(config: ModelConfig, moe: MoEConfig) -> float:
    """Returns the coefficient of the load-balance loss for `transformers`. If all experts are used equally, its loss is
    the number of experts per token, averaged over layers; ours is 1, summed over layers."""
    coefficient: float = moe.moe_aux_loss_coeff
    return coefficient * len(moe.expert_layers(config.num_layers)) / moe.moe_router_topk
