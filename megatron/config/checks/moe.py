"""Checks of mixture-of-experts settings that do not depend on the number of ranks."""

from megatron.config.checks.parallel import other_tensor_size
from megatron.config.notices import spelled
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.layout import EP_FLAG, SizesError, Way, divisors


def check_layers(config: RunConfig) -> None:
    """Checks that --moe-layer-freq can be parsed and selects at least one layer, and that layers have no biases."""
    moe, layers = config.moe, config.model.num_layers
    if not layers or not moe.is_on:
        return
    if not moe.expert_layers(layers):
        raise ConfigError(f"{spelled(config, 'moe_layer_freq')}: no layer has experts; remove --num-experts")
    if config.model.add_bias_linear:
        raise ConfigError(f"{spelled(config, 'num_experts')}: experts have no biases; add --disable-bias-linear")


def check_router(config: RunConfig) -> None:
    moe = config.moe
    if moe.num_experts is None:
        return
    softmax = moe.moe_router_score_function == "softmax"
    if moe.moe_router_topk > moe.num_experts:
        raise ConfigError(
            f"{spelled(config, 'moe_router_topk')} is more than {spelled(config, 'num_experts')}; "
            f"use at most --moe-router-topk {moe.num_experts}"
        )
    if moe.weight_is_always_one and config.origins.get("moe_router_topk") != "checkpoint":
        raise ConfigError(
            "--moe-router-topk 1: the softmax over one expert is 1, so the loss gives the router no gradient; add "
            "--moe-router-pre-softmax, or --use-checkpoint-args for a checkpoint of such a model"
        )
    if softmax and moe.moe_router_enable_expert_bias:
        raise ConfigError(
            f"{spelled(config, 'moe_router_enable_expert_bias')}: needs sigmoid scores; "
            "add --moe-router-score-function sigmoid"
        )
    if softmax and moe.moe_router_topk_scaling_factor and not moe.moe_router_pre_softmax:
        raise ConfigError(
            f"{spelled(config, 'moe_router_topk_scaling_factor')}: cannot scale a softmax over the chosen experts; add "
            "--moe-router-pre-softmax or --moe-router-score-function sigmoid"
        )


def check_groups(config: RunConfig) -> None:
    """Checks that groups have equal sizes and that the chosen groups hold enough experts for a token."""
    moe = config.moe
    groups, chosen, experts = moe.moe_router_num_groups, moe.moe_router_group_topk, moe.num_experts
    if experts is None:
        return
    if (groups is None) != (chosen is None):
        alone, other = ("num_groups", "group_topk") if chosen is None else ("group_topk", "num_groups")
        raise ConfigError(
            f"{spelled(config, f'moe_router_{alone}')}: has no effect without --moe-router-{other.replace('_', '-')}; "
            "give both or neither"
        )
    if groups is None or chosen is None:
        return
    if experts % groups:
        flag = "--moe-router-num-groups"
        raise SizesError(
            f"{spelled(config, 'num_experts')} is not divisible by {spelled(config, 'moe_router_num_groups')}",
            Way(f"use {flag} {{}}", flag, groups, divisors(experts)),
        )
    topk, each = moe.moe_router_topk, experts // groups
    if chosen > groups or topk % chosen or topk // chosen > each:
        fitting = " or ".join(str(n) for n in range(1, groups + 1) if topk % n == 0 and topk // n <= each) or "none"
        raise ConfigError(
            f"{spelled(config, 'moe_router_group_topk')} with {spelled(config, 'moe_router_topk')}: a token must use "
            f"the same number of experts of each chosen group (there are {groups} groups of {each} experts); use "
            f"--moe-router-group-topk {fitting}, or another --moe-router-topk"
        )


def check_experts(config: RunConfig) -> None:
    """Checks that experts divide over the expert-parallel ranks, and their widths over the tensor-parallel ranks."""
    experts, ep = config.moe.num_experts, config.parallel.expert_model_parallel_size
    if ep > 1 and experts is None:
        raise ConfigError(
            f"{spelled(config, 'expert_model_parallel_size')}: the model is dense and has no experts to divide; add "
            "--num-experts N, or use --expert-model-parallel-size 1"
        )
    if experts is not None and experts % ep:
        raise SizesError(
            f"{spelled(config, 'num_experts')} is not divisible by {spelled(config, 'expert_model_parallel_size')}",
            Way(f"use {EP_FLAG} {{}}", EP_FLAG, ep, divisors(experts)),
        )
    tp, width = config.parallel.tensor_model_parallel_size, config.moe.moe_ffn_hidden_size
    for name, size in (
        ("moe_ffn_hidden_size", width),
        ("moe_shared_expert_intermediate_size", config.moe.moe_shared_expert_intermediate_size),
    ):
        if experts is not None and size is not None and size % tp:
            raise SizesError(
                f"{spelled(config, name)} is not divisible by {spelled(config, 'tensor_model_parallel_size')}",
                other_tensor_size(config),
            )
    if experts is not None and config.parallel.expert_tensor_parallel_size not in (None, tp):
        raise ConfigError(
            f"{spelled(config, 'expert_tensor_parallel_size')}: experts are split like all layers, over "
            f"{spelled(config, 'tensor_model_parallel_size')}; remove this flag, or make the two equal"
        )


CHECKS = (check_layers, check_router, check_groups, check_experts)
