"""Presets are valid models with the published number of parameters."""

from __future__ import annotations

import pytest

from megatron.config import ModelConfig, MoEConfig, parse_args
from megatron.config.presets import PRESETS
from megatron.config.run import settings_by_name
from megatron.errors import ConfigError
from tests.unit.config.commands import argv


def parameters(model: ModelConfig, vocabulary: int) -> int:
    """Weights and biases, counted from the shapes."""
    hidden, ffn, width = model.hidden_size, model.ffn_size, model.head_dim
    rows = (model.num_attention_heads + 2 * model.query_groups) * width
    attention = rows * hidden + model.num_attention_heads * width * hidden
    mlp = (3 if model.gated else 2) * hidden * ffn
    norm = hidden * (2 if model.normalization == "LayerNorm" else 1)
    biases = (rows if model.qkv_bias else 0) + ((2 * hidden + ffn) if model.linear_bias else 0)
    layer = attention + mlp + 2 * norm + biases + (2 * width if model.qk_layernorm else 0)
    positions = model.max_position_embeddings * hidden if model.positions == "learned" else 0
    return model.num_layers * layer + norm + vocabulary * hidden * (1 if model.tied else 2) + positions


PUBLISHED = [
    ("gpt2-124m", 50257, 124_439_808),
    ("gpt2-345m", 50257, 354_823_168),
    ("gpt2-774m", 50257, 774_030_080),
    ("gpt2-1.5b", 50257, 1_557_611_200),
    ("llama2-7b", 32000, 6_738_415_616),
    ("llama2-13b", 32000, 13_015_864_320),
    ("llama2-70b", 32000, 68_976_648_192),
    ("llama3-8b", 128256, 8_030_261_248),
    ("llama3-70b", 128256, 70_553_706_496),
    ("llama3.1-8b", 128256, 8_030_261_248),
    ("llama3.1-70b", 128256, 70_553_706_496),
    ("llama3.2-1b", 128256, 1_235_814_400),
    ("llama3.2-3b", 128256, 3_212_749_824),
    ("qwen2.5-0.5b", 151936, 494_032_768),
    ("qwen2.5-1.5b", 151936, 1_543_714_304),
    ("qwen2.5-7b", 152064, 7_615_616_512),
    ("qwen3-0.6b", 151936, 596_049_920),
    ("qwen3-1.7b", 151936, 1_720_574_976),
    ("qwen3-4b", 151936, 4_022_468_096),
    ("qwen3-8b", 151936, 8_190_735_360),
    ("qwen3-14b", 151936, 14_768_307_200),
    ("qwen3-32b", 151936, 32_762_123_264),
    ("mistral-7b", 32000, 7_241_732_096),
]
PUBLISHED_WITH_EXPERTS = [
    ("mixtral-8x7b", 32000, 46_702_792_704),
    ("mixtral-8x22b", 32768, 140_630_071_296),
    ("qwen3-30b-a3b", 151936, 30_532_122_624),
    ("qwen3-235b-a22b", 151936, 235_093_634_560),
]
ROUNDED = {
    "gpt3-125m": 125e6, "gpt3-350m": 350e6, "gpt3-760m": 760e6, "gpt3-1.3b": 1.3e9, "gpt3-2.7b": 2.7e9,
    "gpt3-6.7b": 6.7e9, "gpt3-13b": 13e9, "gpt3-175b": 175e9,
}  # fmt: skip
"""Sizes of the GPT-3 paper. It publishes no exact counts, and transformers has no class of the model."""
OURS = {"gpt3-3.7b", "gpt2-tiny", "llama-tiny", "moe-tiny"}
"""Sizes of an eight-device recipe and of our examples, without a published model."""


def test_every_preset_of_a_published_model_is_compared() -> None:
    compared = [name for name, _, _ in (*PUBLISHED, *PUBLISHED_WITH_EXPERTS)]
    assert sorted([*compared, *ROUNDED, *OURS]) == sorted(PRESETS)


@pytest.mark.parametrize("name", ROUNDED)
def test_the_number_of_parameters_rounds_to_that_of_the_paper(name: str) -> None:
    """The paper's 13B has hidden size 5140, which its 40 heads of 128 do not fit; the preset has 5120."""
    assert parameters(ModelConfig(model=name, **PRESETS[name]), 50257) == pytest.approx(ROUNDED[name], rel=0.025)


@pytest.mark.parametrize(("name", "vocabulary", "count"), PUBLISHED)
def test_the_number_of_parameters_is_the_published_one(name: str, vocabulary: int, count: int) -> None:
    assert parameters(ModelConfig(model=name, **PRESETS[name]), vocabulary) == count


@pytest.mark.parametrize(("name", "vocabulary", "count"), PUBLISHED_WITH_EXPERTS)
def test_the_number_of_parameters_with_experts_is_the_published_one(name: str, vocabulary: int, count: int) -> None:
    values = PRESETS[name]
    moe = MoEConfig(**{n: v for n, v in values.items() if settings_by_name()[n].section == "moe"})
    model = ModelConfig(**{n: v for n, v in values.items() if settings_by_name()[n].section == "model"})
    assert moe.num_experts is not None
    hidden, width = model.hidden_size, moe.moe_ffn_hidden_size or model.ffn_size
    experts = moe.num_experts * (3 * hidden * width + hidden) - 3 * hidden * model.ffn_size
    assert parameters(model, vocabulary) + model.num_layers * experts == count


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_valid_model(name: str) -> None:
    assert all(settings_by_name()[field].section in ("model", "moe") for field in PRESETS[name])
    rest = "--seq-length 32 --micro-batch-size 1 --lr 1e-4 --train-iters 10 --mock-data --vocab-size 100"
    config = parse_args(argv(f"--model {name}", rest))
    assert config.notices == ()
    assert config.model.model == name


def test_the_shapes_of_the_eight_device_recipe() -> None:
    shapes = {name: ModelConfig(**PRESETS[name]) for name in ("gpt2-345m", "gpt3-1.3b", "gpt3-2.7b", "gpt3-3.7b")}
    assert [(m.num_layers, m.hidden_size, m.num_attention_heads) for m in shapes.values()] == [
        (24, 1024, 16),
        (24, 2048, 16),
        (32, 2560, 32),
        (32, 3072, 32),
    ]


@pytest.mark.parametrize(
    ("names", "preset"),
    [
        ("gpt2 GPT2 openai-community/gpt2 gpt2-small gpt2_small gpt2-117m gpt2-125m gpt2-124M", "gpt2-124m"),
        ("gpt2-medium gpt2-355m openai-community/gpt2-medium", "gpt2-345m"),
        ("gpt2-large gpt2-762m", "gpt2-774m"),
        ("gpt2-xl gpt2-1558M", "gpt2-1.5b"),
        ("Qwen/Qwen3-0.6B qwen3_0.6b", "qwen3-0.6b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
    ],
)
def test_the_name_of_a_model_elsewhere_is_told_its_preset(names: str, preset: str) -> None:
    for name in names.split():
        with pytest.raises(ConfigError, match=rf"--model {name}: no such preset \(did you mean {preset}\?\)"):
            parse_args(["--model", name])
