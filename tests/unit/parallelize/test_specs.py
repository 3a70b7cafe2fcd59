"""Shards of each parameter fit every model of both families; a mismatch raises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from megatron.config import ModelConfig, parse_args
from megatron.distributed.parallel_state import Axis, ParallelState
from megatron.errors import ConfigError
from megatron.layout import Layout
from megatron.model.gpt import GPT
from megatron.ops import resolve
from megatron.parallelize import persistent_buffers
from megatron.parallelize.specs import Cut, Held, foreign_specs, held_specs, in_order_of
from megatron.state.division import even_ranges
from megatron.state.shard import Shard, copied_parts, missing_ranges, split_size
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


def specs_of(model: GPT, tp: Axis | None = None) -> dict[str, Shard]:
    cut = Cut(tp or Axis.single("tp"), model.padded_vocab_size)
    held = Held(tuple(range(model.config.num_layers)), range(model.make.moe.num_experts or 0))
    return held_specs(model.table(), held, cut, ParallelState.plan(Layout(1), 0), tied=model.config.tied)


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_a_view_of_its_own_memory(name: str) -> None:
    model, config = build(name)
    specs = in_order_of(model, specs_of(model))
    assert list(specs) == [name for name, _ in model.named_parameters()]
    for parameter_name, parameter in model.named_parameters():
        view = specs[parameter_name].view(parameter.data)
        assert view.shape == specs[parameter_name].logical_shape
        assert view.data_ptr() == parameter.data_ptr()
        padding = parameter.numel() - view.numel()
        rows = PADDED - VOCABULARY if parameter.shape[0] == PADDED else 0
        assert padding == rows * config.hidden_size, "only a vocabulary has rows without meaning"


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_the_ranks_hold_every_parameter_once(name: str, ranks: int) -> None:
    """The shards cover every element, once except for copies, and fit into the stored shape."""
    model, _ = build(name)
    parts = [specs_of(model, Axis("tp", rank, ranks, tuple(range(ranks)))) for rank in range(ranks)]
    for parameter_name, parameter in model.table().items():
        mine = [part[parameter_name] for part in parts]
        assert not missing_ranges(mine), parameter_name
        counted = torch.zeros(parameter.shape)
        for rank, spec in enumerate(mine):
            cut = Cut(Axis("tp", rank, ranks, tuple(range(ranks))), PADDED)
            stored = torch.ones(cut.stored_shape(parameter.row, spec))
            for one in copied_parts(spec, stored):
                one.zero_()
            whole = torch.zeros(parameter.shape)
            spec.put(whole, stored)
            counted += whole
        assert torch.equal(counted, torch.ones(parameter.shape)), parameter_name


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_slices_of_the_views_make_the_parameter_again(name: str, parts: int) -> None:
    for spec in specs_of(build(name)[0]).values():
        full = torch.randn(spec.logical_shape)
        pieces = [replace(spec, ranges=even_ranges(split_size(spec), parts, index)) for index in range(parts)]
        again = torch.full_like(full, float("nan"))
        for piece in pieces:
            piece.put(again, piece.take(full).clone())
        assert torch.equal(again, full), spec.name


def test_a_row_that_matches_nothing_is_an_error() -> None:
    model, _ = build("gpt2")
    gone = Shard(name="gone", logical_shape=(1,))
    with pytest.raises(AssertionError, match="only in the model or only in the table: gone"):
        in_order_of(model, {**specs_of(model), "gone": gone})


def test_a_parameter_without_a_row_is_an_error() -> None:
    model, _ = build("gpt2")
    model.new = nn.Parameter(torch.zeros(1))
    with pytest.raises(AssertionError, match="only in the model or only in the table: new"):
        in_order_of(model, specs_of(model))


def test_what_a_stage_holds() -> None:
    model, _ = build("gpt2")
    stages = [ParallelState.plan(Layout(2, pp=2), rank) for rank in (0, 1)]
    cut, table = Cut(Axis.single("tp"), PADDED), model.table()
    first = held_specs(table, Held((0,), range(0), last=False), cut, stages[0], tied=True)
    last = held_specs(table, Held((1,), range(0), first=False), cut, stages[1], tied=True)
    words = "embedding.word_embeddings.weight"
    assert first.keys() & last.keys() == {words}
    assert first[words].replica_axes == last[words].replica_axes == ("embedding",)
    assert first[words].copies == () and last[words].copies == ((0, VOCABULARY),)
    assert {"embedding.position_embeddings.weight"} <= first.keys() and {"final_layernorm.weight"} <= last.keys()
    untied = held_specs(table, Held((1,), range(0), first=False), cut, stages[1], tied=False)
    assert words not in untied


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
    assert specs["one.weight"] == Shard(name="one.weight", logical_shape=(3, 3), stored=(3, 3))
    assert specs["scale"].logical_shape == ()


@pytest.mark.parametrize("name", MODELS)
def test_our_own_model_keeps_nothing_but_parameters(name: str) -> None:
    assert persistent_buffers(build(name)[0]) == {}


def test_state_that_is_no_tensor_is_refused() -> None:
    class Counting(nn.Module):
        def get_extra_state(self) -> dict[str, int]:
            return {"seen": 3}

        def set_extra_state(self, state: dict[str, int]) -> None: ...

    with pytest.raises(ConfigError, match=r"state that is not a tensor \(0\._extra_state\)"):
        foreign_specs(nn.Sequential(Counting()))
