"""Megatron-DeepSpeed's own flags are mapped by meaning, reported as meaningless, or rejected with their name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.config import RunConfig, check_world
from megatron.config.run import settings_by_name
from megatron.errors import ConfigError
from tests.helpers.other_programs import parse_args
from tests.unit.config.commands import SMALL, argv

EXPERTS = "--num-experts 4 --disable-bias-linear"
MEANINGS: dict[str, dict[str, Any]] = {
    "--checkpoint-activations": {"recompute_granularity": "full", "recompute_method": "uniform"},
    "--checkpoint-activations --checkpoint-num-layers 2": {"recompute_num_layers": 2},
    "--no-pipeline-parallel": {"pipeline_model_parallel_size": 1},
    "--enable-zbh1-pipeline --pipeline-model-parallel-size 2": {"pipeline_schedule": "zero-bubble"},
    "--ds-sequence-parallel-size 2": {"context_parallel_size": 2, "cp_comm_type": ("a2a",)},
    "--num-key-value-heads 2": {"num_query_groups": 2},
    "--use-rotary-position-embeddings --rotary-position-embeddings-theta 500": {"rotary_base": 500.0},
    f"{EXPERTS} --topk 3": {"moe_router_topk": 3},
    f"{EXPERTS} --moe-loss-coeff 0.25": {"moe_aux_loss_coeff": 0.25},
    f"{EXPERTS} --moe-expert-parallel-size 2": {"expert_model_parallel_size": 2},
    "--use-flash-attn-v1": {"use_flash_attn": True},
    "--use-flash-attn-v2": {"use_flash_attn": True},
    "--use-flash-attn-triton": {"use_flash_attn": True},
    "--zero-stage 0": {"zero_stage": 0},
    "--zero-reduce-bucket-size 50000": {"ddp_bucket_size": 50000},
    "--normalization rmsnorm": {"normalization": "RMSNorm"},
}


@pytest.mark.parametrize("flags", MEANINGS)
def test_a_flag_has_its_meaning(flags: str) -> None:
    config = parse_args(argv(SMALL, flags))
    for name, wanted in MEANINGS[flags].items():
        assert config.value(settings_by_name()[name]) == wanted and config.origins[name] == "flag"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--deepspeed-activation-checkpointing", "recomputation has one implementation; see --recompute-granularity"),
        ("--zero-contigious-gradients", "gradients are reduced, and weights gathered, in buckets of --ddp-bucket-size"),
        ("--ds_fused_adam", "there is one implementation of each optimizer; see --kernels"),
        ("--disable-moe-token-dropping", "tokens are dropped only with --moe-expert-capacity-factor"),
        ("--normalization layernorm", "taken as LayerNorm"),
        ("--fp16-lm-cross-entropy", "the loss is always computed in fp32, which is more exact and does not overflow"),
        ("--universal-checkpoint", "a checkpoint loads into any layout"),
    ],
)
def test_a_flag_that_changes_no_result_is_said(flags: str, line: str) -> None:
    assert f"{flags}: {line}" in parse_args(argv(SMALL, flags)).notices


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--zero-stage 3 --remote-device nvme", "--remote-device nvme: parameters are kept in host memory"),
        ("--curriculum-learning", "--curriculum-learning: not supported; every token passes every layer"),
        ("--ds-inference", "--ds-inference: not supported; use tools/generate.py for generation"),
        ("--train-tokens 1000", "--train-tokens 1000: not supported; use --train-samples"),
        ("--partition-activations", "--partition-activations: not supported yet; use --sequence-parallel"),
        ("--deepspeed_mpi", "--deepspeed_mpi: not supported; torchrun or Slurm starts the ranks"),
        ("--load-tag step3", "--load-tag step3: not supported; use --ckpt-step"),
        ("--no-pipeline-parallel --pipeline-model-parallel-size 2", "contradict each other; keep one of them"),
        ("--no-pipeline-parallel --ds-sequence-parallel-size 0", "--context-parallel-size 0: out of range"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(flags: str, line: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(line)):
        parse_args(argv(SMALL, flags))


RECIPE = """
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --num-layers 24 --hidden-size 1024
    --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 4
    --global-batch-size 16 --train-iters 500000 --lr-decay-iters 320000 --lr 0.00015 --min-lr 1.0e-5
    --lr-decay-style cosine --lr-warmup-fraction .01 --weight-decay 1e-2 --clip-grad 1.0 --data-impl mmap
    --data-path my-gpt_text_sentence --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --split 949,50,1
    --log-interval 1 --eval-interval 1000 --eval-iters 10 --save-interval 10000 --save ckpts --load ckpts
    --attention-dropout 0 --hidden-dropout 0 --distributed-backend nccl --fp16 --checkpoint-activations
    --deepspeed-activation-checkpointing --zero-stage 0 --deepspeed
"""
RECIPE_FILE = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10,
    "zero_optimization": {"stage": 0},
    "gradient_clipping": 1.0,
    "prescale_gradients": True,
    "fp16": {
        **{"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1},
        "initial_scale_power": 11,
    },
    "wall_clock_breakdown": True,
}


def recipe(tmp_path: Path, *flags: str) -> RunConfig:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(RECIPE_FILE))
    return parse_args(argv(RECIPE, "--deepspeed_config", str(file), *flags))


def test_the_recipe_for_eight_devices_is_taken_with_its_file(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    check_world(config, 8)
    assert (config.precision.initial_loss_scale, config.precision.loss_scale_window) == (2048.0, 500)
    assert config.logging.timing_log_level == 1 and config.recompute.full
    lines = [line.replace(f"{tmp_path}/", "") for line in config.notices]
    assert "--log-interval 1: replaces steps_per_print 10 of ds_config.json" in lines
    said = "ds_config.json: prescale_gradients true: gradients are divided once, by the number of counted samples"
    assert sum(line.startswith(said) for line in lines) == 1
