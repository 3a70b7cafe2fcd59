"""The command line: spellings, aliases, precedence, contradictions, and the public command lines."""

from __future__ import annotations

import pytest

from megatron.errors import ConfigError
from tests.helpers.other_programs import parse_args
from tests.unit.config.commands import CLASSIC, LLAMA3, SMALL, TUTORIAL, WITH_MODEL_PARALLELISM, argv


@pytest.mark.parametrize("local_rank", ["--local-rank=3", "--local_rank=3", "--local-rank 3", "--local_rank 3"])
def test_the_tutorial_runs_as_typed_under_both_launchers(local_rank: str) -> None:
    config = parse_args(argv(TUTORIAL, local_rank))
    assert config.runtime.local_rank == 3
    assert (config.model.num_layers, config.training.global_batch_size) == (12, 192)
    assert (config.optimizer.weight_decay, config.schedule.lr) == (0.1, 5e-4)
    assert config.precision.params_dtype == "float16"
    assert config.data.data_path == ("codeparrot_content_document",)
    assert config.tokenizer.kind == "GPT2BPETokenizer"
    assert config.checkpoint.save == config.checkpoint.load == "experiments/codeparrot-small"
    assert config.notices == ()


@pytest.mark.parametrize("command", CLASSIC.values(), ids=CLASSIC)
def test_the_classic_scripts_run_as_typed(command: str) -> None:
    config = parse_args(argv(command))
    assert config.schedule.min_lr == 1e-5
    assert config.notices == ("--data-impl mmap: data is always read as .bin/.idx",)


@pytest.mark.parametrize("command", WITH_MODEL_PARALLELISM.values(), ids=WITH_MODEL_PARALLELISM)
def test_scripts_with_model_parallelism_run_as_typed(command: str) -> None:
    parallel = parse_args(argv(command)).parallel
    assert parallel.tensor_model_parallel_size > 1 and parallel.pipeline_model_parallel_size > 1


def test_a_script_of_main_runs_and_says_what_its_flags_mean() -> None:
    config = parse_args(argv(LLAMA3))
    assert config.model.activation == "swiglu"
    assert config.model.positions == "rope"
    assert {line.split(":")[0].split()[0] for line in config.notices} == {
        "--use-mcore-models",
        "--cross-entropy-loss-fusion",
        "--calculate-per-token-loss",
        "--no-create-attention-mask-in-dataloader",
        "--log-throughput",
        "--no-mmap-bin-files",  # of --mock-data
    }


def test_blends_and_ramps() -> None:
    command = "--data-path 0.2 d1 0.3 d2 0.5 d3 --rampup-batch-size 16 16 5859375 --global-batch-size 1536"
    config = parse_args(argv(SMALL.replace("--mock-data", command).replace("--train-iters", "--train-samples"), TOKENS))
    assert config.data.data_path == ("0.2", "d1", "0.3", "d2", "0.5", "d3")
    assert config.training.rampup_batch_size == (16, 16, 5859375)


TOKENS = "--tokenizer-type NullTokenizer"


@pytest.mark.parametrize(
    ("typed", "section", "field", "value"),
    [
        ("--layernorm-epsilon 1e-6", "model", "norm_epsilon", 1e-6),
        ("--norm_epsilon=1e-6", "model", "norm_epsilon", 1e-6),
        ("--override-opt_param-scheduler", "schedule", "override_opt_param_scheduler", True),
        ("--override-opt-param-scheduler", "schedule", "override_opt_param_scheduler", True),
        ("--use_checkpoint_opt_param_scheduler", "schedule", "use_checkpoint_opt_param_scheduler", True),
        ("--no-load-optim --load x", "checkpoint", "load_optim", False),
        ("--disable-bias-linear", "model", "add_bias_linear", False),
        ("--no_position_embedding", "model", "add_position_embedding", False),
        ("--checkpoint-activations", "recompute", "recompute_method", "uniform"),
        ("--activations-checkpoint-method block", "recompute", "recompute_granularity", "full"),
        ("--checkpoint-activations --checkpoint-num-layers 2", "recompute", "recompute_num_layers", 2),
        ("--window-size 7 0", "model", "window_size", (7, 0)),
        ("--window-size 7,0", "model", "window_size", (7, 0)),
        ("--window-size (7,0)", "model", "window_size", (7, 0)),
        ("--num-key-value-heads 2", "model", "num_query_groups", 2),
        ("--log-interval=7", "logging", "log_interval", 7),
        ("--no-query-key-layer-scaling", "model", "apply_query_key_layer_scaling", False),
        (
            "--no-log-learnig-rate-to-tensorboard --tensorboard-dir t",
            "logging",
            "log_learning_rate_to_tensorboard",
            False,
        ),
        ("--seed 7 --seed 7", "training", "seed", 7),
        ("--initial-loss-scale 65536 --fp16", "precision", "initial_loss_scale", 65536.0),
    ],
)
def test_spellings(typed: str, section: str, field: str, value: object) -> None:
    config = parse_args([*argv(SMALL), *typed.split()])
    assert getattr(getattr(config, section), field) == value


def test_batch_size_is_micro_batch_size() -> None:
    config = parse_args(argv(SMALL.replace("--micro-batch-size 2", "--batch-size 4")))
    assert config.training.micro_batch_size == 4
    assert "--batch-size: taken as --micro-batch-size" in config.notices


@pytest.mark.parametrize(
    "flag",
    [
        "--DDP-impl local",
        "--DDP-impl torch",
        "--data-impl infer",
        "--mmap-warmup",
        "--no-async-tensor-model-parallel-allreduce",
        "--accumulate-allreduce-grads-in-fp32",
        "--calculate-per-token-loss",
        "--use-cpu-initialization",
        "--exit-on-missing-checkpoint",
        "--no-pipeline-parallel",
        "--no-query-key-layer-scaling",
        "--transformer-impl transformer_engine",
    ],
)
def test_named_no_ops_print_their_line(flag: str) -> None:
    lines = parse_args(argv(SMALL, flag)).notices
    assert len(lines) == 1
    assert lines[0].startswith(f"{flag}: ")


@pytest.mark.parametrize(
    "neutral",
    [
        "--zero-stage 0",
        "--remote-device none",
        "--mtp-num-layers 0",
        "--data-parallel-sharding-strategy no_shard",
        "--rerun-mode disabled",
        "--vocab-extra-ids 0",
        "--deepspeed=false",
        "--sequence-parallel=false",
    ],
)
def test_what_comes_later_may_be_given_at_its_neutral_value(neutral: str) -> None:
    assert parse_args(argv(SMALL, neutral)).notices == ()


def test_a_flag_given_again_replaces_the_first_and_says_so() -> None:
    """Shell scripts end in "$@", so flags that a user types come last."""
    config = parse_args([*argv(SMALL), "--clip-grad", "0.5", "--clip-grad", "0.25"])
    assert config.optimizer.clip_grad == 0.25
    assert "--clip-grad 0.25: replaces --clip-grad 0.5, which was given before" in config.notices


def test_a_preset_is_overridden_flag_by_flag() -> None:
    rest = "--seq-length 32 --micro-batch-size 1 --lr 1e-4 --train-iters 10 --mock-data --vocab-size 100"
    config = parse_args(argv("--model llama3-8b --num-layers 2 --swiglu=false --openai-gelu", rest))
    assert (config.model.num_layers, config.model.hidden_size, config.model.query_groups) == (2, 4096, 8)
    assert config.model.activation == "gelu_tanh"
    assert config.origins["num_layers"] == "flag"
    assert config.origins["hidden_size"] == "preset llama3-8b"
    assert "seed" not in config.origins


def test_a_script_with_its_own_data_needs_no_data_path() -> None:
    command = argv(SMALL.replace("--mock-data --vocab-size 100", ""))
    with pytest.raises(ConfigError, match="--data-path"):
        parse_args(command)
    assert parse_args(command, needs_data=False).data.data_path is None
