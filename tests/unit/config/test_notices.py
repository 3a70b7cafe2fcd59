"""Flags keep Megatron's meaning, and surprising effects of a setting are printed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.config import ModelConfig, check_settings, parse_args
from megatron.optimizer.loss_scaler import build_loss_scaler
from tests.unit.config.commands import SMALL, argv


def said(flags: str) -> tuple[str, ...]:
    return parse_args(argv(SMALL, flags)).notices


@pytest.mark.parametrize(
    ("flags", "activation"),
    [
        ("", "gelu_tanh"),
        ("--openai-gelu", "gelu_tanh"),
        ("--no-bias-gelu-fusion", "gelu_erf"),
        ("--no-bias-gelu-fusion --openai-gelu", "gelu_tanh"),
        ("--disable-bias-linear", "gelu_erf"),
        ("--disable-bias-linear --openai-gelu", "gelu_tanh"),
        ("--swiglu", "swiglu"),
        ("--swiglu --no-bias-gelu-fusion", "swiglu"),
        ("--squared-relu --disable-bias-linear", "squared_relu"),
    ],
)
def test_the_activation(flags: str, activation: str) -> None:
    assert parse_args(argv(SMALL, flags)).model.activation == activation


@pytest.mark.parametrize(
    ("flags", "said_about"),
    [
        ("--no-bias-gelu-fusion", ["--no-bias-gelu-fusion: GELU is computed in its erf form"]),
        ("--disable-bias-linear", ["--disable-bias-linear: GELU is computed in its erf form"]),
        ("--swiglu --no-bias-gelu-fusion", ["--no-bias-gelu-fusion: has no effect"]),
        ("--swiglu --disable-bias-linear", []),
        ("--use-rotary-position-embeddings", ["--use-rotary-position-embeddings: taken as --position-embedding-type"]),
        ("--num-query-groups 2", ["--num-query-groups 2: turns grouped-query attention on"]),
        ("--num-query-groups 2 --group-query-attention", []),
        ("--optimizer sgd --adam-beta2 0.95", ["--adam-beta2 0.95: has no effect without --optimizer adam"]),
        ("--bf16 --initial-loss-scale 65536", ["--initial-loss-scale 65536.0: has no effect without --fp16"]),
        ("--fp16 --initial-loss-scale 65536", []),
        ("--rotary-base 500000", ["--rotary-base 500000.0: has no effect without rotary positions"]),
        ("--lr-wsd-decay-iters 10", ["--lr-wsd-decay-iters 10: has no effect without --lr-decay-style WSD"]),
        ("--save-interval 10", ["--save-interval 10: has no effect without --save"]),
        ("--log-timers-to-tensorboard", ["--log-timers-to-tensorboard: has no effect without --tensorboard-dir"]),
    ],
)
def test_what_may_surprise_is_said(flags: str, said_about: list[str]) -> None:
    lines = said(flags)
    assert len(lines) == len(said_about)
    assert all(line.startswith(start) for line, start in zip(lines, said_about))


CONSTANT = "--lr-decay-style constant"
MOE = "--num-experts 4 --disable-bias-linear --swiglu"
FILES = "--data-path x --tokenizer-type NullTokenizer"

# Conditions with several sides (one of each is in tests/unit/training/settings_table.py): a setting, flags in which it
# has no effect, what it needs, and flags in which it has one
WITHOUT_EFFECT = [
    ("--lr-decay-iters 50", CONSTANT, "a decay", CONSTANT + " --lr-warmup-fraction 0.1"),
    ("--lr-decay-iters 50", CONSTANT, "a decay", "--lr-decay-style WSD --lr-wsd-decay-iters 9"),
    (
        "--moe-router-load-balancing-type seq_aux_loss",
        MOE,
        "--moe-aux-loss-coeff",
        f"{MOE} --moe-aux-loss-coeff 0.1",
    ),
    (
        "--ffn-hidden-size 128",
        f"{MOE} --moe-ffn-hidden-size 32",
        "a dense layer",
        f"{MOE} --moe-ffn-hidden-size 32 --moe-layer-freq 2",
    ),
    ("--ffn-hidden-size 128", f"{MOE} --moe-ffn-hidden-size 32", "a dense layer", MOE),
    ("--eval-interval 5", f"{FILES} --split 1,0,0", "validation data", f"{FILES} --split 9,1,0"),
    (
        "--eval-interval 5",
        f"{FILES} --train-data-path y",
        "validation data",
        f"{FILES} --train-data-path y --valid-data-path z",
    ),
]


def about(setting: str, flags: str) -> list[str]:
    command = SMALL
    if "--data-path" in flags:
        command = command.replace("--mock-data", "")
    if "--train-data-path" in flags:
        flags = flags.replace("--data-path x ", "", 1)
    return [line for line in parse_args(argv(command, flags, setting)).notices if line.startswith(setting.split()[0])]


@pytest.mark.parametrize(("setting", "without_effect", "needed", "with_effect"), WITHOUT_EFFECT)
def test_a_setting_without_effect_is_told_where_it_has_none(
    setting: str, without_effect: str, needed: str, with_effect: str | None
) -> None:
    (line,) = about(setting, without_effect)
    assert ": has no effect without " + needed in line
    if with_effect is not None:
        assert about(setting, with_effect) == []


def test_balancing_that_is_turned_off_is_not_said_to_be_without_effect() -> None:
    assert about("--moe-router-load-balancing-type none", MOE) == []


@pytest.mark.parametrize(("given", "beyond"), [("5 100", ""), ("5 101 300", "101 300"), ("0 100", "0")])
def test_iterations_to_skip_that_do_not_exist_are_named(given: str, beyond: str) -> None:
    lines = about(f"--iterations-to-skip {given}", "")
    assert len(lines) == bool(beyond)
    assert all(line.startswith(f"--iterations-to-skip {beyond}: no such iterations") for line in lines)


def test_a_constant_loss_scale_is_used_without_fp16() -> None:
    (line,) = said("--loss-scale 3")
    assert line.startswith("--loss-scale 3.0: fp32 training needs no loss scale")
    assert said("--loss-scale 3 --fp16") == said("--loss-scale 1") == ()
    assert build_loss_scaler(parse_args(argv(SMALL, "--loss-scale 3")).precision).scale == 3.0


@pytest.mark.parametrize(
    ("flags", "spec"),
    [
        ("", "auto"),
        ("--no-masked-softmax-fusion --no-bias-dropout-fusion", "auto,-softmax,-bias_dropout_add"),
        ("--kernels ref,-softmax --no-masked-softmax-fusion", "ref,-softmax"),
        ("--no-persist-layer-norm --no-gradient-accumulation-fusion", "auto,-wgrad_accumulation,-layer_norm"),
        ("--swiglu --no-bias-swiglu-fusion", "auto,-swiglu"),
    ],
)
def test_fusion_switches_leave_operations_out(flags: str, spec: str) -> None:
    assert parse_args(argv(SMALL, flags)).kernels.spec == spec


@pytest.mark.parametrize(("flags", "backend"), [("", "auto"), ("--use-flash-attn", "flash")])
def test_flash_attention_is_an_attention_backend(flags: str, backend: str) -> None:
    assert parse_args(argv(SMALL, flags)).kernels.attention == backend


def test_the_width_of_the_mlp() -> None:
    shape = {"num_layers": 1, "hidden_size": 4096, "num_attention_heads": 32}
    assert ModelConfig(**shape).ffn_size == 16384
    assert ModelConfig(**shape, swiglu=True).ffn_size == 10880
    assert ModelConfig(**shape, swiglu=True, ffn_hidden_size=11008).ffn_size == 11008


@pytest.mark.parametrize(
    ("flags", "positions"),
    [
        ("", "learned"),
        ("--no-position-embedding", "none"),
        ("--position-embedding-type none", "none"),
        ("--position-embedding-type rope --no-position-embedding", "rope"),
        ("--use-rotary-position-embeddings --no-position-embedding", "rope"),
        ("--position-embedding-type yarn", "rope"),
    ],
)
def test_positions(flags: str, positions: str) -> None:
    assert parse_args(argv(SMALL, flags)).model.positions == positions


def test_biases_and_heads() -> None:
    shape = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4}
    assert ModelConfig(**shape).qkv_bias and ModelConfig(**shape).linear_bias
    assert ModelConfig(**shape).query_groups == 4
    qwen = ModelConfig(**shape, add_bias_linear=False, add_qkv_bias=True, num_query_groups=1, kv_channels=32)
    assert (qwen.qkv_bias, qwen.linear_bias, qwen.query_groups, qwen.head_dim) == (True, False, 1, 32)


def test_a_value_that_was_taken_out_again_is_not_said_to_be_given() -> None:
    """tools/check_layout.py removes files like this, because its ranks do not read them."""
    config = parse_args(argv(SMALL.replace("--vocab-size 100", ""), "--vocab-file v --merge-file m"))
    without_files = replace(config.tokenizer, vocab_file=None, merge_file=None, tokenizer_type="NullTokenizer")
    check_settings(replace(config, tokenizer=replace(without_files, vocab_size=5)))


def test_what_second_moments_in_bf16_lose_is_told() -> None:
    """A step with beta 0.999 changes them by less than half a unit of bf16."""
    narrow = "--use-precision-aware-optimizer --exp-avg-sq-dtype bf16"
    assert any("--exp-avg-sq-dtype bf16: with --adam-beta2 0.999" in line for line in said(narrow))
    assert not any("--adam-beta2" in line for line in said(f"{narrow} --adam-beta2 0.95"))
    assert not any("--adam-beta2" in line for line in said(narrow.replace("-sq", "")))


def test_a_schedule_that_ends_in_its_warm_up_is_told() -> None:
    decay = "--lr-schedule WarmupDecayLR --total-num-steps 500"
    assert any(line.startswith("--total-num-steps 500 is below --warmup-num-steps 1000") for line in said(decay))
    assert not any("nothing is left" in line for line in said(f"{decay} --warmup-num-steps 400"))


def test_a_rate_that_no_schedule_takes_is_told() -> None:
    flags = "--lr 1e-3 --lr-schedule LRRangeTest"
    assert any(line.startswith("--lr 0.001: has no effect without a schedule") for line in said(flags))
    assert not any(line.startswith("--lr ") for line in said(flags.replace("LRRangeTest", "WarmupLR")))
