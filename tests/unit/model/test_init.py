from __future__ import annotations

import math

import pytest
import torch

from megatron.model.init import initial_value
from megatron.model.parameters import parameters
from megatron.model.random_values import normal_values
from tests.unit.model.helpers import LLAMA, build, config


def draw(name: str, shape: tuple[int, ...], std: float, seed: int) -> torch.Tensor:
    return normal_values(seed, name, [(0, math.prod(shape))], std).view(shape)


def test_a_draw_depends_on_seed_and_name_only() -> None:
    one = draw("layers.3.mlp.dense_h_to_4h.weight", (4, 5), 0.1, 1)
    torch.manual_seed(99)
    torch.randn(7)
    assert torch.equal(one, draw("layers.3.mlp.dense_h_to_4h.weight", (4, 5), 0.1, 1))
    assert not torch.equal(one, draw("layers.3.mlp.dense_h_to_4h.weight", (4, 5), 0.1, 2))
    assert not torch.equal(one, draw("layers.4.mlp.dense_h_to_4h.weight", (4, 5), 0.1, 1))


def test_the_global_generator_is_untouched() -> None:
    state = torch.get_rng_state()
    build(config())
    assert torch.equal(state, torch.get_rng_state())


def test_fp32_whatever_the_default_dtype() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert draw("x", (3,), 1.0, 0).dtype == torch.float32
        assert initial_value(parameters(config(), 61)["final_layernorm.weight"], 0).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_layer_subsets_start_the_same() -> None:
    shape = config(**LLAMA)
    whole, part = build(shape), build(shape, layers=range(2, 3), first=False, last=False)
    assert len(list(part.parameters())) > 0
    for name, value in part.named_parameters():
        assert torch.equal(value, whole.get_parameter(name))


def test_standard_deviations() -> None:
    model = build(config(num_layers=8, hidden_size=64, init_method_std=0.05))
    narrow = 0.05 / math.sqrt(16)
    for name, value in model.named_parameters():
        if name.endswith(".bias"):
            assert not value.any(), name
        elif "layernorm" in name:
            assert (value == 1).all(), name
        else:
            output = name.endswith(("attention.dense.weight", "4h_to_h.weight"))
            assert abs(value.std().item() / (narrow if output else 0.05) - 1) < 0.1, name


@pytest.mark.parametrize(
    ("name", "fans"),
    [
        ("layers.0.self_attention.query_key_value.weight", 96 + 32),
        ("layers.0.self_attention.dense.weight", 32 + 32),
        ("layers.0.mlp.dense_h_to_4h.weight", 200 + 32),
        ("embedding.word_embeddings.weight", 61 + 32),
    ],
)
def test_xavier(name: str, fans: int) -> None:
    settings = config(init_method_xavier_uniform=True, swiglu=True, ffn_hidden_size=100)
    parameter = parameters(settings, 61)[name]
    values = initial_value(parameter, 0)
    bound = math.sqrt(6 / fans)
    assert values.abs().max() <= bound
    assert values.abs().max() > 0.97 * bound
    assert values.shape == parameter.row.shape
