"""A config.json with absent keys, or keys in older places, is read as transformers reads it."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.config import ModelConfig
from megatron.errors import ConfigError
from megatron.interop.hf.families import by_model_type

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}


def imported(model_type: str, values: dict[str, Any]) -> ModelConfig:
    return by_model_type(model_type).read_config(values)[0]


@pytest.mark.parametrize(
    ("given", "window"), [({}, (4095, 0)), ({"sliding_window": None}, None), ({"sliding_window": 7}, (6, 0))]
)
def test_mistral_has_a_window_unless_it_says_null(given: dict[str, Any], window: tuple[int, int] | None) -> None:
    assert imported("mistral", {**SHAPE, **given}).window == window


def test_heads_of_qwen3_are_128_wide_unless_it_says_otherwise() -> None:
    assert imported("qwen3", SHAPE).head_dim == 128
    assert imported("qwen3", {**SHAPE, "head_dim": 16}).head_dim == 16
    assert imported("qwen2", SHAPE).head_dim == 64 // 8


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral"])
def test_only_llama_means_all_heads_by_no_number_of_key_heads(family: str) -> None:
    shape = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}
    assert imported("llama", shape).query_groups == 8
    assert imported(family, {**shape, "num_key_value_heads": None}).query_groups == 8
    with pytest.raises(ConfigError, match="num_key_value_heads is missing"):
        imported(family, shape)


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling", None])
def test_a_partial_rotation_is_refused_wherever_it_stands(place: str | None) -> None:
    partial = {"partial_rotary_factor": 0.5}
    with pytest.raises(ConfigError, match=r"partial_rotary_factor 0\.5 is not supported"):
        imported("llama", {**SHAPE, **(partial if place is None else {place: partial})})
    whole = {"partial_rotary_factor": 1.0}
    assert imported("llama", {**SHAPE, **whole}).rotary_percent == 1.0


def test_gpt2_with_two_kinds_of_hidden_dropout() -> None:
    shape = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 32, "resid_pdrop": 0.1}
    assert imported("gpt2", shape).hidden_dropout == 0.1
    family, both = by_model_type("gpt2"), {**shape, "embd_pdrop": 0.3}
    assert family.not_taken_over(shape) is None and imported("gpt2", both).hidden_dropout == 0.1
    line = family.not_taken_over(both)
    assert (
        line is not None
        and "embd_pdrop 0.3 is not imported: --hidden-dropout is used for both, with the value of resid_pdrop, 0.1"
        in line
    )
    with pytest.raises(ConfigError, match=r"embd_pdrop is 1\.5; it has to be"):
        imported("gpt2", {**shape, "embd_pdrop": 1.5})


NEOX: dict[str, Any] = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}


@pytest.mark.parametrize(
    ("given", "share", "base"),
    [
        ({}, 0.25, 1e4),
        ({"rotary_pct": 0.5, "rotary_emb_base": 5e5}, 0.5, 5e5),  # transformers 4
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 5e5}}, 0.5, 5e5),
        ({"rope_parameters": {"rope_type": "default"}, "rotary_pct": 1.0}, 1.0, 1e4),
    ],
)
def test_the_share_of_heads_that_neox_rotates(given: dict[str, Any], share: float, base: float) -> None:
    config = imported("gpt_neox", {**NEOX, **given})
    assert (config.rotary_percent, config.rotary_base) == (share, base)
    assert config.use_parallel_residual and config.activation == "gelu_erf" and not config.tied


def test_what_of_neox_is_refused() -> None:
    for given, message in (
        ({"attention_bias": False}, "attention_bias False is not supported"),
        ({"rotary_pct": 0.4}, "RoPE would rotate 0.4 of the 8 channels of a head, that is 3;"),
        ({"hidden_act": "silu"}, "hidden_act 'silu' is not supported; supported: gelu_new"),
    ):
        with pytest.raises(ConfigError, match=message):
            imported("gpt_neox", {**NEOX, **given})


def test_defaults_of_olmo2() -> None:
    config = imported("olmo2", {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"})
    assert (config.norm_epsilon, config.query_groups, config.head_dim, config.tied) == (1e-5, 8, 8, False)
    assert (config.norm_placement, config.qk_layernorm, config.qk_layernorm_scope) == ("after", True, "all")
    for family in ("olmo2", "qwen3"):  # no such model has biases in its MLP, so "both" would be no way out
        for name in ("attention_bias", "mlp_bias"):
            with pytest.raises(ConfigError, match=f"{name} True is not supported; only False"):
                imported(family, {**SHAPE, name: True})


def test_noise_on_routers_is_refused() -> None:
    experts = {**SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2}
    imported("mixtral", {**experts, "router_jitter_noise": 0.0})
    with pytest.raises(ConfigError, match=r"router_jitter_noise 0\.1 is not supported; only 0\.0"):
        imported("mixtral", {**experts, "router_jitter_noise": 0.1})


def test_defaults_of_mixtral() -> None:
    experts = {**SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = imported("mixtral", experts)
    assert (config.norm_epsilon, config.rotary_base) == (1e-5, 1e6)
    assert imported("mixtral", {**experts, "rope_parameters": {"rope_theta": 1e4}}).rotary_base == 1e4


def test_names_that_gpt2_also_takes() -> None:
    named = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}
    config = imported("gpt2", {**named, "n_head": 8})
    assert (config.hidden_size, config.num_layers, config.num_attention_heads) == (64, 2, 4)
    assert config.max_position_embeddings == 32


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("family", "given", "message"),
    [
        ("llama", {"is_causal": False}, "is_causal False is not supported; only True"),
        ("gpt2", {"is_causal": None}, "is_causal None is not supported; only True"),
        (
            "qwen3",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": YARN},
            "rope_parameters and rope_scaling differ; keep only the right one",
        ),
        (
            "llama",
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "original_max_position_embeddings": 8},
            "original_max_position_embeddings 8 is not supported; only 32",
        ),
        ("llama", {"rope_scaling": {**YARN, "factor": None}}, "rope_scaling: factor is None; it has to be a positive"),
        ("llama", {"rope_parameters": {"rope_theta": None}}, "rope_parameters: rope_theta is None; it has to be"),
        (
            "qwen2",
            {"rope_parameters": {"full_attention": {"rope_theta": 9.0}}},
            "full_attention has its own RoPE settings",
        ),
        (
            "qwen2",
            {"layer_types": ["sliding_attention"] * 2},
            "layer_types names layers with a window, but sliding_window sets none",
        ),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0; it has to be a whole number from 1"),
        ("gpt_neox", {"rope_theta": 5e5}, "rope_theta 500000.0 is not supported; only 10000.0"),
        ("gpt_neox", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported; only 0.25"),
        ("gpt_neox", {"head_dim": 16}, "head_dim 16 is not supported; only 8"),
    ],
)
def test_what_transformers_takes_otherwise_is_refused(family: str, given: dict[str, Any], message: str) -> None:
    """Rejects what transformers' classes do not declare but compute with, contradictions and invalid values."""
    shape = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 32} if family == "gpt2" else SHAPE
    with pytest.raises(ConfigError) as error:
        imported(family, {**shape, **given})
    assert message in str(error.value)


def test_a_rotation_that_is_described_twice_alike_is_read() -> None:
    assert imported("llama", {**SHAPE, "rope_parameters": YARN, "rope_scaling": YARN}).positions == "rope"
    kept = {"rotary_pct": 0.5, "partial_rotary_factor": 0.5, "rotary_emb_base": 5e5, "rope_theta": 5e5}
    assert imported("gpt_neox", {**NEOX, **kept}).rotary_base == 5e5  # as transformers 4 writes them


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("name", ["type", "rope_type"])
def test_yarn_without_its_first_length_means_the_longest_one(family: str, name: str) -> None:
    """Versions 4 and 5 of transformers do the same, in both spellings of version 4."""
    bare = {name: "yarn", "factor": 3.0}
    config = imported(family, {**SHAPE, "max_position_embeddings": 96, "rope_theta": 1e6, "rope_scaling": bare})
    assert (config.positions, config.rotary_base, config.yarn_factor) == ("rope", 1e6, 3.0)
    assert config.yarn_original_max_position_embeddings == 96
