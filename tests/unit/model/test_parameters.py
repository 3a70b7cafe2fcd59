"""The table of parameters: its rows for the models of both families; it names exactly their parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megatron.config import MoEConfig
from megatron.model.parameters import Normal, classic_path, parameters, stored_shape
from tests.unit.model.helpers import GPT2, LLAMA, VOCAB, build, config

MOE = MoEConfig(
    num_experts=3, moe_ffn_hidden_size=40, moe_router_enable_expert_bias=True, moe_shared_expert_intermediate_size=24
)
CASES: list[tuple[dict[str, Any], MoEConfig | None]] = [
    (GPT2, None),
    (LLAMA, None),
    ({**LLAMA, "qk_layernorm": True, "add_qkv_bias": True}, None),
    (LLAMA, MOE),
]


@pytest.mark.parametrize(("family", "moe"), CASES)
def test_it_names_every_parameter_and_its_stored_shape(family: dict[str, Any], moe: MoEConfig | None) -> None:
    model = build(config(**family), moe=moe)
    table = model.table()
    stored = model.state_dict()
    assert table.keys() == stored.keys()
    assert {name: parameter.stored_shape for name, parameter in table.items()} == {
        name: tuple(tensor.shape) for name, tensor in stored.items()
    }
    trained = {name for name, _ in model.named_parameters()}
    assert trained == {name for name, parameter in table.items() if parameter.row.trained}
    assert all(parameter.row.decays == (stored[name].dim() > 1) for name, parameter in table.items())


def test_what_tensor_parallelism_will_split() -> None:
    settings = config(**LLAMA)
    table = parameters(settings, VOCAB)
    groups, ffn = settings.query_groups, settings.ffn_size
    qkv = table["layers.1.self_attention.query_key_value.weight"].row
    assert (qkv.kind, qkv.shape, qkv.split_dim, qkv.fold) == ("column", (groups, 4 // groups + 2, 8, 32), 0, 2)
    gate_up = table["layers.0.mlp.dense_h_to_4h.weight"].row
    assert (gate_up.kind, gate_up.shape, gate_up.split_dim) == ("column", (2, ffn, 32), 1), "gate and up alike"
    dense = table["layers.0.self_attention.dense.weight"].row
    assert (dense.kind, dense.shape, dense.split_dim) == ("row", (32, 4, 8), 1), "by head"
    assert table["final_layernorm.weight"].row.split_dim is None


def test_what_is_added_to_the_residual_stream_starts_smaller() -> None:
    table = parameters(config(num_layers=8, init_method_std=0.02), VOCAB)
    assert table["layers.3.mlp.dense_4h_to_h.weight"].row.start == Normal(0.02 / math.sqrt(16))
    assert table["layers.3.mlp.dense_h_to_4h.weight"].row.start == Normal(0.02)
    assert table["layers.3.input_layernorm.weight"].row.start == 1.0
    assert table["layers.3.mlp.dense_h_to_4h.bias"].row.start == 0.0


def test_layers_and_experts_count_through_the_model() -> None:
    moe = MoEConfig(num_experts=2, moe_layer_freq="[0,1]")
    table = parameters(config(**LLAMA, num_layers=2), VOCAB, moe)
    expert = table["layers.1.mlp.experts.1.dense_4h_to_h.weight"]
    assert (expert.layer, expert.expert, expert.row.kind) == (1, 1, "expert")
    assert "layers.0.mlp.dense_4h_to_h.weight" in table and "layers.1.mlp.dense_4h_to_h.weight" not in table


def test_stored_shapes() -> None:
    assert stored_shape((2, 3, 4, 5), 3) == (24, 5)
    assert stored_shape((5, 3, 4), 1) == (5, 12)
    assert stored_shape((2, 3, 4), 3) == (24,)


def test_places_in_the_classic_file() -> None:
    encoder = ("language_model", "encoder")
    assert classic_path("layers.5.mlp.dense_h_to_4h.weight", 4) == (*encoder, "layers.1.mlp.dense_h_to_4h.weight")
    assert classic_path("final_layernorm.bias") == (*encoder, "final_layernorm.bias")
    embedding = ("language_model", "embedding", "word_embeddings", "weight")
    assert classic_path("embedding.word_embeddings.weight") == embedding
    assert classic_path("output_layer.weight") == ("language_model", "output_layer", "weight")
    assert classic_path("net.0.weight") == ("net.0.weight",), "what is not a GPT's keeps its own name"
