"""Impossible mixture-of-experts settings are rejected in one line with the flags and the fix."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.config import ModelConfig, MoEConfig, parse_args
from megatron.errors import ConfigError
from tests.helpers.runs import flags, make_run

MOE: dict[str, Any] = {"num_experts": 8, "disable_bias_linear": True}
EP, TP = "expert_model_parallel_size", "tensor_model_parallel_size"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({EP: 2}, ["--expert-model-parallel-size 2", "dense", "--num-experts", "--expert-model-parallel-size 1"]),
        ({**MOE, EP: 3}, ["--num-experts 8", "--expert-model-parallel-size 3", "2 or 4"]),
        ({**MOE, EP: 16}, ["--num-experts 8", "--expert-model-parallel-size 16", "8"]),
        ({**MOE, "moe_router_topk": 9}, ["--moe-router-topk 9", "--num-experts 8", "at most"]),
        ({**MOE, "moe_router_topk": 1}, ["--moe-router-topk 1", "--moe-router-pre-softmax", "--use-checkpoint-args"]),
        ({"num_experts": 8}, ["--num-experts 8", "--disable-bias-linear"]),
        ({**MOE, "moe_router_enable_expert_bias": True}, ["--moe-router-enable-expert-bias", "sigmoid"]),
        (
            {**MOE, "moe_router_topk_scaling_factor": 2.0},
            ["--moe-router-topk-scaling-factor 2.0", "sigmoid", "--moe-router-pre-softmax"],
        ),
        ({**MOE, "moe_router_num_groups": 4}, ["--moe-router-num-groups 4", "--moe-router-group-topk", "both"]),
        ({**MOE, "moe_router_group_topk": 1}, ["--moe-router-group-topk 1", "--moe-router-num-groups"]),
        (
            {**MOE, "moe_router_num_groups": 3, "moe_router_group_topk": 1},
            ["--num-experts 8", "--moe-router-num-groups 3", "2 or 4"],
        ),
        (
            {**MOE, "moe_router_topk": 4, "moe_router_num_groups": 4, "moe_router_group_topk": 1},
            ["--moe-router-group-topk 1", "--moe-router-topk 4", "4 groups of 2", "use --moe-router-group-topk 2 or 4"],
        ),
        (
            {**MOE, "moe_router_topk": 3, "moe_router_num_groups": 4, "moe_router_group_topk": 2},
            ["--moe-router-group-topk 2", "--moe-router-topk 3", "use --moe-router-group-topk 3"],
        ),
        ({**MOE, "moe_layer_freq": "([0]*1+[1]*2)"}, ["--moe-layer-freq", "3 entries", "--num-layers 2"]),
        ({**MOE, "moe_layer_freq": "[0]*2"}, ["--moe-layer-freq", "no layer has experts"]),
        ({**MOE, "moe_layer_freq": "__import__('os')"}, ["--moe-layer-freq", "neither a number nor a 0/1 list"]),
        ({**MOE, "moe_layer_freq": 0}, ["--moe-layer-freq 0", "number"]),
        (
            {**MOE, "moe_expert_capacity_factor": 1.0, "context_parallel_size": 2},
            ["--moe-expert-capacity-factor 1.0", "--context-parallel-size 2"],
        ),
        (
            {**MOE, "moe_expert_capacity_factor": 1.0, TP: 2, "sequence_parallel": True},
            ["--moe-expert-capacity-factor 1.0", "--sequence-parallel"],
        ),
        (
            {**MOE, TP: 2, "moe_ffn_hidden_size": 33},
            ["--moe-ffn-hidden-size 33", f"--{TP}".replace("_", "-"), "use --tensor-model-parallel-size 1"],
        ),
        ({**MOE, TP: 2, "moe_shared_expert_intermediate_size": 9}, ["--moe-shared-expert-intermediate-size 9"]),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_refused_in_one_line(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args(flags(**settings))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_more_expert_ranks_than_replicas_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--expert-model-parallel-size 8: .* --expert-model-parallel-size 2$"):
        make_run(parse_args(flags(**MOE, **{EP: 8, TP: 2})), world_size=4)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("1", (0, 1, 2, 3)),
        ("2", (0, 2)),
        ("5", (0,)),
        ("[0,1,0,1]", (1, 3)),
        ("([0]*1+[1]*3)", (1, 2, 3)),
        ("[0, 1] * 2", (1, 3)),
        ("[1]+[0,1]+[1]", (0, 2, 3)),
    ],
)
def test_which_layers_have_experts(text: str, layers: tuple[int, ...]) -> None:
    assert MoEConfig(num_experts=2, moe_layer_freq=text).expert_layers(4) == layers
    assert MoEConfig(moe_layer_freq=text).expert_layers(4) == (), "a dense model has none"


def test_what_has_no_effect_is_said() -> None:
    (line,) = parse_args(flags(moe_router_topk=4)).notices
    assert line == "--moe-router-topk 4: has no effect without --num-experts"


def test_a_loss_that_moves_with_the_micro_batch_is_said() -> None:
    lines = parse_args(flags(**MOE, moe_aux_loss_coeff=0.1, openai_gelu=True)).notices
    assert any("with seq_aux_loss it does not" in line for line in lines)
    quiet = flags(**MOE, moe_aux_loss_coeff=0.1, moe_router_load_balancing_type="seq_aux_loss", openai_gelu=True)
    assert parse_args(quiet).notices == ()


def test_the_other_dispatcher_is_said_to_be_the_same() -> None:
    lines = parse_args(flags(**MOE, openai_gelu=True, moe_token_dispatcher_type="allgather")).notices
    assert lines == (
        "--moe-token-dispatcher-type allgather: tokens are always sent by all-to-all, each to the ranks of its experts "
        "only; an all-gather computes the same and sends more",
    )


def test_presets_with_experts_are_what_they_say() -> None:
    qwen = parse_args(flags(model="qwen3-30b-a3b", **dict.fromkeys(("num_layers", "hidden_size"), None)))
    assert isinstance(qwen.model, ModelConfig) and qwen.moe.num_experts == 128 and qwen.moe.moe_ffn_hidden_size == 768
