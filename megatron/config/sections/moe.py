"""Mixture of experts, multi-latent attention, multi-token prediction: known by name, built by a later version."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flag import flag


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    num_experts: int | None = flag(None, "Experts per MoE layer.", status="later", note="train a dense model")
    moe_layer_freq: int = flag(1, "Every how many layers is a MoE layer.", status="later", note="leave it at 1")
    moe_ffn_hidden_size: int | None = flag(None, "Width of an expert.", status="later", note="leave it out")
    moe_router_topk: int = flag(2, "Experts per token.", status="later", note="leave it at 2")
    moe_router_load_balancing_type: str = flag(
        "aux_loss", "How the load is balanced.", status="later", note="leave it at aux_loss"
    )
    moe_aux_loss_coeff: float = flag(0.0, "Weight of the load-balance loss.", status="later", note="leave it at 0")
    moe_z_loss_coeff: float | None = flag(None, "Weight of the router z-loss.", status="later", note="leave it out")
    moe_expert_capacity_factor: float | None = flag(
        None, "Capacity of an expert; unset is dropless.", status="later", note="leave it out"
    )
    moe_token_dispatcher_type: str = flag(
        "allgather", "How tokens travel to experts.", status="later", note="leave it out"
    )
    moe_grouped_gemm: bool = flag(False, "One grouped product for all experts.", status="later", note="leave it out")
    moe_shared_expert_intermediate_size: int | None = flag(
        None, "Width of the shared expert.", status="later", note="leave it out"
    )
    moe_router_score_function: str = flag(
        "softmax", "Score function of the router.", status="later", note="leave it at softmax"
    )
    moe_router_enable_expert_bias: bool = flag(
        False, "Balance by a bias instead of a loss.", status="later", note="leave it out"
    )
    multi_latent_attention: bool = flag(
        False, "Multi-latent attention.", status="later", note="use --num-query-groups for a small KV cache"
    )
    q_lora_rank: int | None = flag(None, "Rank of MLA's query projection.", status="later", note="leave it out")
    kv_lora_rank: int = flag(32, "Rank of MLA's key/value projection.", status="later", note="leave it out")
    mtp_num_layers: int | None = flag(
        None, "Depth of multi-token prediction.", status="later", note="leave it out", neutral=(0,)
    )
    mtp_loss_scaling_factor: float = flag(
        0.1, "Weight of the multi-token prediction loss.", status="later", note="leave it out"
    )
