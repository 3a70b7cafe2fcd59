"""Flags keep Megatron's meaning, and surprising effects of a setting are printed."""

from __future__ import annotations

import pytest

from megatron.config import ModelConfig, parse_args
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
