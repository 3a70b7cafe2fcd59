"""Sizes that do not divide are rejected in one line that names both flags and sizes that work."""

from __future__ import annotations

import re
from typing import Any

import pytest

from megatron.config import parse_args
from megatron.config.checks import check_settings, check_world
from megatron.config.checks.parallel import check_zero
from megatron.config.run import RunConfig, build
from megatron.errors import ConfigError
from tests.helpers.runs import flags
from tests.unit.config.commands import argv

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
VIRTUAL = "num_layers_per_virtual_pipeline_stage"
GROUP = "microbatch_group_size_per_virtual_pipeline_stage"
TP_FLAG, PP_FLAG = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"


@pytest.mark.parametrize(
    ("settings", "ranks", "words"),
    [
        ({TP: 3}, 3, ["--num-attention-heads 4", "--tensor-model-parallel-size 3", "2 or 4"]),
        (
            {TP: 4, "hidden_size": 48, "num_attention_heads": 12, "num_query_groups": 6, "group_query_attention": True},
            4,
            ["--num-query-groups 6", "--tensor-model-parallel-size 4", "3 or 6"],
        ),
        (
            {TP: 3, "hidden_size": 48, "num_attention_heads": 3, "swiglu": True},
            3,
            ["--ffn-hidden-size 128 (computed from --hidden-size) is not divisible by --tensor-model-parallel-size 3"],
        ),
        ({TP: 4, "sequence_parallel": True, "seq_length": 14}, 4, ["--seq-length 14", "--seq-length 12 or 16"]),
        (
            {PP: 2, "num_layers": 3},
            2,
            ["--num-layers 3", "--pipeline-model-parallel-size 2", "1 or 3", "--decoder-first"],
        ),
        ({PP: 2, "num_layers": 3, FIRST: 3}, 2, ["--num-layers 3", "--decoder-first-pipeline-num-layers 3", "leave"]),
        ({PP: 2, "num_layers": 5, FIRST: 2, LAST: 2}, 2, ["--num-layers 5", "leave", "1 layers"]),
        ({PP: 2, "num_layers": 6, VIRTUAL: 2}, 2, ["--num-layers 6", VIRTUAL.replace("_", "-"), "1 or 3"]),
        ({VIRTUAL: 1}, 1, ["--num-layers-per-virtual-pipeline-stage 1", "--pipeline-model-parallel-size 1"]),
        ({PP: 2, VIRTUAL: 1, "num_layers": 4, FIRST: 1}, 2, ["--decoder-first-pipeline-num-layers", "keep one"]),
        (
            {PP: 2, VIRTUAL: 1, "num_layers": 4, "pipeline_schedule": "1f1b"},
            2,
            ["--pipeline-schedule 1f1b", "interleaved"],
        ),
        (
            {PP: 2, "pipeline_schedule": "interleaved"},
            2,
            ["--pipeline-schedule interleaved", "--num-layers-per-virtual"],
        ),
        (
            {TP: 4, "ffn_hidden_size": 90, "num_attention_heads": 4},
            4,
            [
                "--ffn-hidden-size 90",
                "--tensor-model-parallel-size 4",
                "use --tensor-model-parallel-size 2",
            ],  # not 3 or 5, which divide 90 but no heads
        ),
        (
            {TP: 2, "expert_tensor_parallel_size": 1, "num_experts": 4, "disable_bias_linear": True},
            2,
            ["--expert-tensor-parallel-size 1", "--tensor-model-parallel-size 2", "make the two equal"],
        ),
        (
            {"pipeline_schedule": "gpipe"},
            1,
            ["--pipeline-schedule gpipe", "several stages (--pipeline-model-parallel-size)"],
        ),
        (
            {PP: 2, VIRTUAL: 1, "num_layers": 4, "micro_batch_size": 2, "global_batch_size": 6},
            2,
            ["--global-batch-size 6", "--pipeline-model-parallel-size 2", "multiples of 4", "such as 4 or 8"],
        ),
        (
            {PP: 2, VIRTUAL: 1, "num_layers": 4, GROUP: 1},
            2,
            ["--microbatch-group-size-per-virtual-pipeline-stage 1", "use at least 2"],
        ),
        (
            {PP: 2, VIRTUAL: 1, "num_layers": 4, GROUP: 3, "micro_batch_size": 2, "global_batch_size": 8},
            2,
            [
                "--global-batch-size 8: the interleaved schedule takes micro-batches in groups of",
                "--microbatch-group-size-per-virtual-pipeline-stage 3 and at least 2 in the last; use multiples of 6",
                "such as 6 or 12",
            ],
        ),
        ({TP: 2}, 3, ["--tensor-model-parallel-size 2", "processes, 3, is not", "start 2 or 4 processes"]),
        (
            {TP: 4},
            2,
            ["--tensor-model-parallel-size 4", "processes, 2, is not", "start 4", "use --tensor-model-parallel-size 2"],
        ),
        ({TP: 2, PP: 2}, 2, ["--tensor-model-parallel-size 2 x --pipeline-model-parallel-size 2 = 4", "start 4"]),
        (
            {"global_batch_size": 6, "micro_batch_size": 4},
            2,
            [
                "--global-batch-size 6",
                "--micro-batch-size 4",
                "--global-batch-size 4 or 8",
                "--micro-batch-size 3 or 6",
            ],
        ),
        (
            {"global_batch_size": 6, "micro_batch_size": 2},
            2,
            ["--global-batch-size 6", "--micro-batch-size 2 x 2", "4 or 8", "--micro-batch-size 1 or 3"],
        ),
    ],
)
def test_sizes_that_do_not_fit(settings: dict[str, Any], ranks: int, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        config = parse_args(flags(**settings))
        check_settings(config)
        check_world(config, ranks)
    assert "\n" not in str(refused.value)
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ({TP: 2}, 2),
        ({TP: 4, "num_query_groups": 2, "group_query_attention": True}, 4),
        ({PP: 2, "num_layers": 4, VIRTUAL: 1, "micro_batch_size": 1}, 4),
        ({PP: 3, "num_layers": 5, FIRST: 1, LAST: 1}, 3),
        ({TP: 2, "expert_tensor_parallel_size": 1}, 2),  # of a dense model
        ({PP: 2, "num_layers": 4, VIRTUAL: 1, GROUP: 3, "micro_batch_size": 2, "global_batch_size": 10}, 2),
        ({PP: 2, "num_layers": 4, VIRTUAL: 1, "eval_global_batch_size": 6, "micro_batch_size": 2}, 2),
    ],
)
def test_sizes_that_fit(settings: dict[str, Any], ranks: int) -> None:
    config = parse_args(flags(**settings))
    check_settings(config)
    check_world(config, ranks)


@pytest.mark.parametrize(
    ("settings", "stage"),
    [
        ({}, 0),
        ({"zero_stage": 2}, 2),
        ({"use_distributed_optimizer": True}, 1),
        ({"use_torch_fsdp2": True}, 3),
        ({"data_parallel_sharding_strategy": "no_shard"}, 0),
        ({"data_parallel_sharding_strategy": "optim"}, 1),
        ({"data_parallel_sharding_strategy": "optim_grads"}, 2),
        ({"data_parallel_sharding_strategy": "optim_grads_params", "use_distributed_optimizer": True}, 3),
        ({"zero_stage": 3, "use_torch_fsdp2": True, "use_distributed_optimizer": True}, 3),
    ],
)
def test_every_spelling_of_zero_means_a_stage(settings: dict[str, Any], stage: int) -> None:
    config = build(settings)
    check_zero(config)
    assert config.parallel.zero == stage


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"zero_stage": 0, "use_distributed_optimizer": True}, ["--use-distributed-optimizer", "--zero-stage 0"]),
        ({"zero_stage": 2, "use_torch_fsdp2": True}, ["--use-torch-fsdp2 and --zero-stage 2", "stages 3 and 2"]),
        (
            {"zero_stage": 1, "data_parallel_sharding_strategy": "optim_grads"},
            ["--data-parallel-sharding-strategy optim_grads", "--zero-stage 1", "keep one"],
        ),
        ({"use_torch_fsdp2": True, "data_parallel_sharding_strategy": "no_shard"}, ["no_shard", "keep one"]),
        (
            {"num_distributed_optimizer_instances": 2},
            ["--num-distributed-optimizer-instances 2", "--zero-stage 2 or 3"],
        ),
    ],
)
def test_spellings_of_zero_that_contradict_each_other_are_refused(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_zero(build(settings))
    assert all(word in str(refusal.value) for word in words), refusal.value


SEVEN = {"num_layers": 6, "hidden_size": 96, "num_attention_heads": 12, "micro_batch_size": 2, "global_batch_size": 48}
EXPERTS = {"num_experts": 4, "disable_bias_linear": True, "moe_router_topk": 2}
FULL = {"max_position_embeddings": 16, "seq_length": 15}
WRONG: list[tuple[dict[str, Any], int]] = [
    ({TP: 4, PP: 2}, 100),
    ({TP: 4}, 20),
    ({PP: 3}, 40),
    ({TP: 4, PP: 2, "global_batch_size": 14}, 100),
    ({TP: 2, "context_parallel_size": 2, "cp_comm_type": "a2a"}, 30),
    ({TP: 5}, 8),
    ({TP: 8, "num_query_groups": 6, "group_query_attention": True}, 8),
    ({TP: 5, "sequence_parallel": True, "seq_length": 12}, 8),
    ({TP: 4, "sequence_parallel": True, **FULL}, 8),
    ({PP: 4}, 8),
    ({PP: 4, "pipeline_schedule": "gpipe", "num_layers": 7}, 8),
    ({PP: 4, "account_for_loss_in_pipeline_split": True}, 8),
    ({PP: 2, VIRTUAL: 2}, 8),
    ({PP: 2, "num_virtual_stages_per_pipeline_rank": 2, "pipeline_schedule": "interleaved"}, 8),
    ({PP: 2, VIRTUAL: 1, "global_batch_size": 44}, 4),
    ({"context_parallel_size": 3}, 3),
    ({"context_parallel_size": 2, **FULL}, 2),
    ({"context_parallel_size": 8, "cp_comm_type": "a2a"}, 8),
    ({"expert_model_parallel_size": 3, **EXPERTS}, 6),
    ({"expert_model_parallel_size": 4, **EXPERTS}, 6),
    ({TP: 4, **EXPERTS, "moe_ffn_hidden_size": 6}, 4),
    ({**EXPERTS, "moe_router_num_groups": 3, "moe_router_group_topk": 2}, 1),
    ({"global_batch_size": 13}, 1),
    ({"micro_batch_size": 8}, 4),
    ({"global_batch_size": 32, "rampup_batch_size": [8, 8, 100], "train_samples": 999, "train_iters": None}, 3),
    ({"gradient_accumulation_steps": 5, "micro_batch_size": None}, 2),
    ({"gradient_accumulation_steps": 5}, 2),
    ({"eval_global_batch_size": 5}, 2),
    ({"num_distributed_optimizer_instances": 3, "zero_stage": 2}, 4),
]


def refusal(settings: dict[str, Any], ranks: int) -> tuple[str, bool]:
    """The error of these settings, and whether the number of ranks was looked at; "" if they pass all checks."""
    try:
        config: RunConfig = parse_args(flags(**settings))
    except ConfigError as error:
        return "\n".join(error.lines), False
    try:
        check_world(config, ranks)
    except ConfigError as error:
        return "\n".join(error.lines), True
    return "", True


@pytest.mark.parametrize(("settings", "ranks"), WRONG)
def test_every_suggested_size_passes_all_checks(settings: dict[str, Any], ranks: int) -> None:
    """Types each suggestion. An error of the settings alone cannot know the number of ranks."""
    given = {**SEVEN, **settings}
    told, in_world = refusal(given, ranks)
    fix = told.partition("; ")[2]
    assert fix, told
    found = re.findall(r"(start|make it|use --[a-z-]+(?= \d))((?: or)? \d+(?: or \d+)?)", fix)
    assert found or "change several" in fix or "remove" in fix or "give" in fix, told
    for words, sizes in found:
        name = "global_batch_size" if words == "make it" else words.removeprefix("use --").replace("-", "_")
        for size in map(int, re.findall(r"\d+", sizes)):
            again = refusal(given, size) if words == "start" else refusal({**given, name: size}, ranks)
            left = set(again[0].splitlines()) - set(told.splitlines())
            assert not left or (again[1] and not in_world), (told, words, size, left)


def test_a_large_model_on_a_number_of_processes_that_does_not_fit() -> None:
    command = "--model llama3-70b --mock-data --vocab-size 9 --seq-length 64 "
    command += f"{TP_FLAG} 8 {PP_FLAG} 4 --lr 1 --train-iters 9"
    config = parse_args(argv(command, "--micro-batch-size 1 --global-batch-size 512"))
    with pytest.raises(ConfigError, match=r"is not divisible by 32; start 512 or 1024 processes$"):
        check_world(config, 1000)
