"""Mixture of experts: routers, experts and load balancing. Also flags of architectures that are not built yet."""

import re
from dataclasses import dataclass
from functools import partial
from typing import Literal

from megatron.config.flag import Need, excludes, flag
from megatron.errors import ConfigError
from megatron.utils.numerals import EXPERTS, WIDTH

_TERM = re.compile(r"\[([01](?:,[01])*)\](?:\*([0-9]{1,9}))?")


_EXPERTS = Need("--num-experts", lambda run: run.moe.is_on)
_SOFTMAX = Need("--moe-router-score-function softmax", lambda run: run.moe.moe_router_score_function == "softmax")
_BALANCED = Need(
    "--moe-router-load-balancing-type aux_loss or seq_aux_loss",
    lambda run: run.moe.moe_router_load_balancing_type != "none",
)
_COEFFICIENT = Need(
    "--moe-aux-loss-coeff above 0",
    lambda run: run.moe.moe_aux_loss_coeff > 0 or run.moe.moe_router_load_balancing_type == "none",
)
_EXPERT_BIAS = Need("--moe-router-enable-expert-bias", lambda run: run.moe.moe_router_enable_expert_bias)
_CAPACITY = Need("--moe-expert-capacity-factor", lambda run: run.moe.moe_expert_capacity_factor is not None)
_expert_flag = partial(flag, needs=(_EXPERTS,))


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    num_experts: int | None = flag(
        None, "Number of experts of each MoE layer. Unset: a dense model.", at_least=1, at_most=EXPERTS
    )
    moe_layer_freq: str = _expert_flag(
        "1", "Layers with experts: every N-th, beginning with the first, or a 0/1 list such as ([0]*3+[1]*9)."
    )
    moe_ffn_hidden_size: int | None = _expert_flag(
        None, "Width of an expert. Unset: --ffn-hidden-size.", at_least=1, at_most=WIDTH
    )
    moe_router_topk: int = _expert_flag(2, "Number of experts per token.", at_least=1)
    moe_router_pre_softmax: bool = flag(
        False,
        "Apply the softmax to all experts, before the choice. The weights of a token then do not add up to 1.",
        needs=(_EXPERTS, _SOFTMAX),
    )
    moe_router_score_function: str = _expert_flag(
        "softmax", "Function from a router's logits to scores.", choices=("softmax", "sigmoid")
    )
    moe_router_num_groups: int | None = _expert_flag(
        None, "Number of expert groups. A token uses experts of only --moe-router-group-topk groups.", at_least=1
    )
    moe_router_group_topk: int | None = _expert_flag(
        None,
        "Number N of expert groups per token. The router chooses the groups whose best --moe-router-topk / N scores "
        "have the largest sum.",
        at_least=1,
    )
    moe_router_topk_scaling_factor: float | None = _expert_flag(
        None, "Factor on each token's expert weights. Needs sigmoid scores or --moe-router-pre-softmax.", above=0.0
    )
    moe_router_dtype: str | None = _expert_flag(
        None, "Data type of routers. Unset: logits in the model's type, scores in fp32.", choices=("fp32", "fp64")
    )
    moe_router_load_balancing_type: str = flag(
        "aux_loss",
        "Scope of the load-balance loss. seq_aux_loss: each sequence; aux_loss: the whole micro-batch, so training "
        "depends on --micro-batch-size.",
        choices=("aux_loss", "seq_aux_loss", "none"),
        refused={
            "sinkhorn": "Sinkhorn routing is not supported; use seq_aux_loss",
            "global_aux_loss": "a loss over the global batch is not supported; use seq_aux_loss",
        },
        needs=(_EXPERTS, _COEFFICIENT),
    )
    moe_aux_loss_coeff: float = flag(0.0, "Weight of the load-balance loss.", at_least=0.0, needs=(_EXPERTS, _BALANCED))
    moe_z_loss_coeff: float | None = _expert_flag(None, "Weight of the router z-loss.", at_least=0.0)
    moe_router_enable_expert_bias: bool = _expert_flag(
        False, "Balance experts by a bias on the scores that select them. Needs sigmoid scores."
    )
    moe_router_bias_update_rate: float = flag(
        1e-3, "Change of the expert bias per step.", at_least=0.0, needs=(_EXPERT_BIAS,)
    )
    moe_expert_capacity_factor: float | None = _expert_flag(
        None,
        "Most tokens of a sequence that an expert takes, as a multiple of an even share. It drops the others. "
        "Unset: no token is dropped.",
        above=0.0,
        excludes=excludes(
            "context_parallel_size",
            Need("--sequence-parallel", lambda run: run.parallel.splits_sequence),
            why="whole sequences decide which tokens are dropped, and the latter splits sequences",
            own=lambda run: run.moe.is_on and run.moe.moe_expert_capacity_factor is not None,
        ),
    )
    moe_token_drop_policy: str = flag(
        "probs",
        "Tokens that an expert drops. probs: the lowest weights; position: the latest positions.",
        choices=("probs", "position"),
        needs=(_CAPACITY,),
    )
    moe_token_dispatcher_type: str = flag(
        "alltoall",
        "Communication of tokens to experts on other ranks.",
        choices=("alltoall", "allgather", "flex"),
        status="no-op",
        note="tokens are always sent by all-to-all, each to the ranks of its experts only; an all-gather computes the "
        "same and sends more",
    )
    moe_grouped_gemm: bool = flag(
        False,
        "Multiply all experts of a rank in one grouped product. It changes no result.",
        status="no-op",
        note="a grouped product is used wherever the device has one (grouped_linear in the table of kernels); "
        "--kernels auto,-grouped_linear multiplies expert after expert",
    )
    moe_shared_expert_intermediate_size: int | None = _expert_flag(
        None, "Width of the shared expert, which processes every token.", at_least=1, at_most=WIDTH
    )
    multi_latent_attention: bool = flag(
        False, "Use multi-latent attention.", status="later", note="use --num-query-groups for a small KV cache"
    )
    q_lora_rank: int | None = flag(None, "Rank of MLA's query projection.", status="later", note="remove the flag")
    kv_lora_rank: int = flag(32, "Rank of MLA's key/value projection.", status="later", note="remove the flag")
    mtp_num_layers: int | None = flag(
        None, "Depth of multi-token prediction.", status="later", note="remove the flag", neutral=(0,)
    )
    mtp_loss_scaling_factor: float = flag(
        0.1, "Weight of the multi-token prediction loss.", status="later", note="remove the flag"
    )

    @property
    def is_on(self) -> bool:
        return self.num_experts is not None

    @property
    def weight_is_always_one(self) -> bool:
        """True if each token's only expert has weight 1, so the router gets no gradient from the model's loss."""
        softmax_of_chosen = self.moe_router_score_function == "softmax" and not self.moe_router_pre_softmax
        return self.is_on and self.moe_router_topk == 1 and softmax_of_chosen

    @property
    def balances(self) -> bool:
        """True if a load-balance loss has a gradient."""
        return self.is_on and self.moe_aux_loss_coeff > 0.0 and self.moe_router_load_balancing_type != "none"

    @property
    def balanced_over(self) -> Literal["sequence", "micro-batch"]:
        return "sequence" if self.moe_router_load_balancing_type == "seq_aux_loss" else "micro-batch"

    def only_own_width(self, num_layers: int) -> bool:
        """True if every layer has experts, and --moe-ffn-hidden-size sets their width."""
        own = self.is_on and self.moe_ffn_hidden_size is not None
        return own and len(self.expert_layers(num_layers)) == num_layers

    def expert_layers(self, num_layers: int) -> tuple[int, ...]:
        """Indices of the layers that have experts."""
        return tuple(n for n, on in enumerate(_pattern(self.moe_layer_freq, num_layers)) if on) if self.is_on else ()


def _pattern(text: str, num_layers: int) -> list[bool]:
    """Returns, for each layer, True if the layer has experts."""
    written = text.replace(" ", "")
    if re.fullmatch(r"0*[1-9][0-9]{0,8}", written):
        return [layer % int(written) == 0 for layer in range(num_layers)]
    terms = [_TERM.fullmatch(term) for term in written.removeprefix("(").removesuffix(")").split("+")]
    repeated = [(term[1].split(","), int(term[2] or 1)) for term in terms if term]
    entries = sum(len(digits) * times for digits, times in repeated)  # before expanding a list that may be huge
    if not all(terms) or entries != num_layers:
        found = (
            f"has {entries} entries for --num-layers {num_layers}"
            if all(terms)
            else "is neither a number nor a 0/1 list"
        )
        raise ConfigError(
            f"--moe-layer-freq {text[:200]}: {found}; give a number (every N-th layer has experts), or one 0 or 1 per "
            "layer such as ([0]*3+[1]*9)"
        )
    return [digit == "1" for digits, times in repeated for digit in digits * times]
