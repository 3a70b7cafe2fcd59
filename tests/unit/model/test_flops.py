from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron.config import MoEConfig
from megatron.model.flops import flops_per_token, peak_flops
from tests.unit.model.helpers import GPT2, LLAMA, build, config

OPTIONS: list[dict[str, Any]] = [
    GPT2,
    LLAMA,
    LLAMA | {"num_query_groups": 1, "kv_channels": 16, "add_qkv_bias": True},
    LLAMA | {"qk_layernorm": True, "window_size": (7, 0), "untie_embeddings_and_output_weights": False},
    GPT2 | {"squared_relu": True, "add_bias_linear": False, "ffn_hidden_size": 72},
    GPT2 | {"position_embedding_type": "none", "bias_gelu_fusion": False},
]


@pytest.mark.parametrize("kernels", ["auto,-attention,-packed_attention", "ref"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_formula_against_what_torch_counts(options: dict[str, Any], kernels: str) -> None:
    shape = config(num_layers=2, **options)
    model = build(shape, kernels=kernels, vocab_size=100, padded=100)
    ids = torch.randint(100, (2, 32))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(ids, labels=ids).mean().backward()
    expected = flops_per_token(shape, seq_length=32, padded_vocab_size=100) * ids.numel()
    assert abs(counter.get_total_flops() / expected - 1) < 0.01


@pytest.mark.parametrize(
    "experts",
    [
        {},
        {"moe_router_topk": 3, "moe_ffn_hidden_size": 40, "moe_layer_freq": "[0,1]"},
        {"moe_shared_expert_intermediate_size": 48, "moe_router_score_function": "sigmoid"},
    ],
    ids=str,
)
def test_formula_with_experts(experts: dict[str, Any]) -> None:
    shape, moe = config(**LLAMA | {"num_layers": 2}), MoEConfig(num_experts=5, **experts)
    model = build(shape, kernels="ref", vocab_size=100, padded=100, moe=moe)
    ids = torch.randint(100, (2, 32))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(ids, labels=ids).mean().backward()
    expected = flops_per_token(shape, seq_length=32, padded_vocab_size=100, moe=moe) * ids.numel()
    assert abs(counter.get_total_flops() / expected - 1) < 0.01
    dense = flops_per_token(shape, seq_length=32, padded_vocab_size=100) * ids.numel()
    assert abs(counter.get_total_flops() / dense - 1) > 0.01, "the formula without experts is another"


@pytest.mark.parametrize("options", OPTIONS[:2], ids=["gpt2", "llama"])
def test_formula_under_the_math_backend_of_sdpa(options: dict[str, Any]) -> None:
    shape = config(num_layers=2, **options)
    ids = torch.randint(100, (2, 32))
    from megatron.ops.sdpa import sdpa

    model = build(shape, vocab_size=100)
    for block in model.layers.values():
        core = block.self_attention.core_attention
        core.forward = lambda q, k, v, visible, scale=core.scale: sdpa(q, k, v, mask=None, causal=True, scale=scale)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(ids, labels=ids).mean().backward()
    expected = flops_per_token(shape, seq_length=32, padded_vocab_size=100) * ids.numel()
    assert abs(counter.get_total_flops() / expected - 1) < 0.01


def test_the_published_formula() -> None:
    """Tests 72 B s L h^2 (1 + s / 6h + V / 12Lh), per token."""
    layers, hidden, seq, vocab = 24, 2048, 1024, 50304
    shape = config(num_layers=layers, hidden_size=hidden, num_attention_heads=16)
    published = 72 * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * layers * hidden))
    assert flops_per_token(shape, seq_length=seq, padded_vocab_size=vocab) == pytest.approx(published)


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [
        ("NVIDIA H200", "bfloat16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "float16", 989.4e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5e12),
        ("NVIDIA B200", "bfloat16", 2250e12),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("Tesla V100-SXM2-16GB", "float16", 125e12),
        ("Tesla V100-SXM2-16GB", "bfloat16", None),
        ("NVIDIA B200", "float32", None),
        ("NVIDIA A1000 Laptop GPU", "bfloat16", None),
        ("cpu", "bfloat16", None),
        ("NVIDIA H200", "float64", None),
    ],
)
def test_peaks(device: str, dtype: str, peak: float | None) -> None:
    assert peak_flops(device, dtype) == peak
