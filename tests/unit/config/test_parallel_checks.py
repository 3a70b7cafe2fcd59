"""Sizes that do not divide are rejected in one line that names both flags and sizes that work."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.config import parse_args
from megatron.config.checks import check_settings, check_world
from megatron.config.checks.parallel import check_zero
from megatron.config.run import build
from megatron.errors import ConfigError
from tests.helpers.runs import flags

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
VIRTUAL = "num_layers_per_virtual_pipeline_stage"
GROUP = "microbatch_group_size_per_virtual_pipeline_stage"
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
        ({TP: 2}, 3, ["--tensor-model-parallel-size 2", "processes, 3, is not", "start 2 or 4", "1 or 3"]),
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
