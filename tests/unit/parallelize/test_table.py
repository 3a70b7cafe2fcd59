"""The table of logical views: it fits every model of both families, and says so loudly when it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from megatron.config import ModelConfig, parse_args
from megatron.distributed.shard import ShardSpec, even_ranges
from megatron.errors import ConfigError
from megatron.model.gpt import GPT
from megatron.ops import resolve
from megatron.parallelize import Row, foreign_specs, gpt_specs, gpt_table, match_table, persistent_buffers
from tests.helpers.runs import LLAMA_SHAPE, flags

VOCABULARY, PADDED = 97, 112
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2, no biases": {"disable_bias_linear": True},
    "llama": {
        **LLAMA_SHAPE,
        "group_query_attention": True,
        "num_query_groups": 2,
    },
    "qwen": {
        "normalization": "RMSNorm",
        "swiglu": True,
        "position_embedding_type": "rope",
        "disable_bias_linear": True,
        "add_qkv_bias": True,
        "qk_layernorm": True,
        "kv_channels": 16,
        "group_query_attention": True,
        "num_query_groups": 1,
    },
}


def build(name: str) -> tuple[GPT, ModelConfig]:
    config = parse_args(flags(**MODELS[name])).model
    model = GPT(config, vocab_size=VOCABULARY, padded_vocab_size=PADDED, kernels=resolve("ref", "cpu"))
    return model, config


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_a_view_of_its_own_memory(name: str) -> None:
    model, config = build(name)
    specs = gpt_specs(model, config, VOCABULARY)
    assert specs.keys() == dict(model.named_parameters()).keys()
    for parameter_name, parameter in model.named_parameters():
        view = specs[parameter_name].view(parameter.data)
        assert view.shape == specs[parameter_name].logical_shape
        assert view.data_ptr() == parameter.data_ptr()
        padding = parameter.numel() - view.numel()
        rows = PADDED - VOCABULARY if parameter.shape[0] == PADDED else 0
        assert padding == rows * config.hidden_size, "only a vocabulary has rows without meaning"


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_slices_of_the_views_make_the_parameter_again(name: str, parts: int) -> None:
    model, config = build(name)
    for spec in gpt_specs(model, config, VOCABULARY).values():
        full = torch.randn(spec.logical_shape)
        pieces = [replace(spec, ranges=even_ranges(spec.size, parts, index)) for index in range(parts)]
        again = torch.full_like(full, float("nan"))
        for piece in pieces:
            piece.put(again, piece.take(full).clone())
        assert torch.equal(again, full), spec.name


def test_what_tensor_parallelism_will_split() -> None:
    _, config = build("llama")
    rows = {row.pattern: row for row in gpt_table(config, VOCABULARY)}
    qkv = rows[r"layers\.\d+\.self_attention\.query_key_value\.weight"]
    assert (qkv.logical_shape, qkv.split_dim) == ((2, 4 // 2 + 2, 8, 32), 0), "by KV group"
    gate_up = rows[r"layers\.\d+\.mlp\.dense_h_to_4h\.weight"]
    assert (gate_up.logical_shape, gate_up.split_dim) == ((2, config.ffn_size, 32), 1), "gate and up alike"
    dense = rows[r"layers\.\d+\.self_attention\.dense\.weight"]
    assert (dense.logical_shape, dense.split_dim) == ((32, 4, 8), 1), "by head"
    assert rows[r"final_layernorm\.(weight|bias)"].split_dim is None


def test_a_row_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(AssertionError, match=r"match no parameter: \['gone'\]"):
        match_table([Row("a", (1,)), Row("gone", (1,))], ["a"])


def test_a_parameter_without_a_row_is_an_error() -> None:
    with pytest.raises(AssertionError, match="parameter b matches 0 rows"):
        match_table([Row("a", (1,))], ["a", "b"])


def test_a_parameter_with_two_rows_is_an_error() -> None:
    with pytest.raises(AssertionError, match="parameter a matches 2 rows"):
        match_table([Row("a", (1,)), Row("[ab]", (1,))], ["a"])


def test_a_row_matches_whole_names() -> None:
    with pytest.raises(AssertionError, match=r"parameter x\.a matches 0 rows"):
        match_table([Row("a", (1,))], ["x.a"])


def test_a_model_of_another_shape_than_its_settings_is_an_error() -> None:
    model, _ = build("gpt2")
    with pytest.raises(AssertionError, match="matches 0 rows"):
        gpt_specs(model, build("gpt2, no biases")[1], VOCABULARY)


class Foreign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.one, self.two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.two.weight = self.one.weight
        self.register_buffer("scratch", torch.zeros(5), persistent=False)


def test_a_foreign_model_is_whole_with_its_buffers() -> None:
    model = Foreign()
    assert set(persistent_buffers(model)) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    specs = foreign_specs(model)
    assert set(specs) == {"scale", "norm.weight", "norm.bias", "one.weight", *persistent_buffers(model)}
    assert specs["one.weight"] == ShardSpec(name="one.weight", logical_shape=(3, 3))
    assert specs["scale"].logical_shape == ()


@pytest.mark.parametrize("name", MODELS)
def test_our_own_model_keeps_nothing_but_parameters(name: str) -> None:
    assert persistent_buffers(build(name)[0]) == {}


def test_state_that_is_no_tensor_is_refused() -> None:
    class Counting(nn.Module):
        def get_extra_state(self) -> dict[str, int]:
            return {"seen": 3}

        def set_extra_state(self, state: dict[str, int]) -> None: ...

    with pytest.raises(ConfigError, match=r"state that is no tensor \(0\._extra_state\)"):
        foreign_specs(nn.Sequential(Counting()))
