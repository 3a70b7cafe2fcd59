from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config import MoEConfig, RecomputeConfig
from megatron.model import GPT, initialise
from megatron.model.attention_mask import Visible
from megatron.model.factory import ModuleFactory
from megatron.ops import resolve
from tests.unit.model.helpers import GPT2, LLAMA, VOCAB, build, config, tokens

FAMILIES = pytest.mark.parametrize("family", [GPT2, LLAMA], ids=["gpt2", "llama"])

OPTIONS: list[dict[str, Any]] = [
    GPT2,
    LLAMA,
    LLAMA | {"add_qkv_bias": True, "qk_layernorm": True, "kv_channels": 12},
    LLAMA | {"rotary_percent": 0.5, "num_query_groups": 1},
    GPT2 | {"squared_relu": True, "qk_layernorm": True},
    GPT2 | {"apply_layernorm_1p": True},
    GPT2 | {"position_embedding_type": "none", "window_size": (5, 0)},
    GPT2 | {"apply_residual_connection_post_layernorm": True},
    GPT2 | {"apply_query_key_layer_scaling": True},
    GPT2 | {"num_query_groups": 2, "bias_gelu_fusion": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_fast_kernels_equal_the_reference_in_fp64(options: dict[str, Any]) -> None:
    """Loss, logits and every gradient, with padded vocabulary rows."""
    results = []
    for kernels in ("auto", "ref"):
        model = build(config(**options), dtype=torch.float64, kernels=kernels, padded=64)
        loss = model(tokens(), labels=tokens(seed=1))
        loss.mean().backward()
        results.append([loss.detach(), model(tokens()).detach(), *(p.grad for p in model.parameters())])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-12)


@FAMILIES
def test_loss_is_the_cross_entropy_of_the_logits(family: dict[str, Any]) -> None:
    model = build(config(**family), padded=64)
    logits, labels = model(tokens()), tokens(seed=1)
    assert logits.shape == (2, 24, VOCAB)
    loss = model(tokens(), labels=labels)
    assert loss.shape == (2, 24) and loss.dtype == torch.float32
    torch.testing.assert_close(
        loss, F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(2, 24)
    )


@FAMILIES
def test_padded_rows_have_no_meaning(family: dict[str, Any]) -> None:
    plain, padded = build(config(**family)), build(config(**family), padded=128)
    head = padded.output_layer if padded.output_layer is not None else padded.embedding.word_embeddings
    with torch.no_grad():
        head.weight[VOCAB:] = 1e4  # would win every softmax
    torch.testing.assert_close(padded(tokens()), plain(tokens()), rtol=0, atol=0)
    for model in (plain, padded):
        model(tokens(), labels=tokens(seed=1)).sum().backward()
    for (name, one), two in zip(plain.named_parameters(), padded.parameters(), strict=True):
        torch.testing.assert_close(two.grad[: len(one)], one.grad, rtol=1e-5, atol=1e-5, msg=name)
        assert not two.grad[len(one) :].any()


def test_names_are_the_contract() -> None:
    names = {name for name, _ in build(config(num_layers=1)).named_parameters()}
    pairs = [
        "layers.0.input_layernorm",
        "layers.0.self_attention.query_key_value",
        "layers.0.self_attention.dense",
        "layers.0.post_attention_layernorm",
        "layers.0.mlp.dense_h_to_4h",
        "layers.0.mlp.dense_4h_to_h",
        "final_layernorm",
    ]
    expected = {f"{pair}.{kind}" for pair in pairs for kind in ("weight", "bias")}
    assert names == expected | {"embedding.word_embeddings.weight", "embedding.position_embeddings.weight"}
    llama = {name for name, _ in build(config(num_layers=1, **LLAMA, qk_layernorm=True)).named_parameters()}
    assert llama == {name for name in expected if name.endswith("weight")} | {
        "embedding.word_embeddings.weight",
        "output_layer.weight",
        "layers.0.self_attention.q_layernorm.weight",
        "layers.0.self_attention.k_layernorm.weight",
    }
    assert not list(
        build(config(**LLAMA)).state_dict().keys() - {n for n, _ in build(config(**LLAMA)).named_parameters()}
    )


@FAMILIES
def test_parts_of_the_model_make_the_whole(family: dict[str, Any]) -> None:
    shape = config(**family, untie_embeddings_and_output_weights=True) if not family else config(**family)
    whole = build(shape)
    parts = [
        build(shape, layers=range(0, 1), last=False),
        build(shape, layers=range(1, 3), first=False, last=False),
        build(shape, layers=range(3, 4), first=False),
    ]
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
    for part in parts:
        for name, value in part.named_parameters():
            assert torch.equal(value, whole.get_parameter(name)), name
    hidden: Tensor | None = None
    for part in parts:
        hidden = part(tokens(), hidden=hidden, labels=tokens(seed=1))
    assert hidden is not None
    assert torch.equal(hidden, whole(tokens(), labels=tokens(seed=1)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@FAMILIES
def test_half_precision_runs_and_is_near(family: dict[str, Any], dtype: torch.dtype) -> None:
    exact = build(config(**family))(tokens(), labels=tokens(seed=1)).mean()
    for residual in (False, True):
        model = build(config(**family, fp32_residual_connection=residual), dtype=dtype)
        loss = model(tokens(), labels=tokens(seed=1)).mean()
        loss.backward()
        assert loss.dtype == torch.float32
        assert all(p.grad is not None and p.grad.dtype == dtype for p in model.parameters())
        assert abs(loss - exact) < 0.05


def test_fp32_residual_stream() -> None:
    """The residual stream is fp32 and more exact; the layers themselves stay in bf16."""
    errors = {}
    exact = build(config(num_layers=4, hidden_size=64), dtype=torch.float64)(tokens())
    for residual in (False, True):
        model = build(config(num_layers=4, hidden_size=64, fp32_residual_connection=residual), dtype=torch.bfloat16)
        seen = []
        model.layers["2"].register_forward_hook(lambda _, __, out, seen=seen: seen.append(out.dtype))
        errors[residual] = (model(tokens()).double() - exact).norm()
        assert seen == [torch.float32 if residual else torch.bfloat16]
    assert errors[True] < errors[False]


def test_apply_layernorm_1p_is_the_same_function() -> None:
    plain, shifted = build(config()), build(config(apply_layernorm_1p=True))
    assert not shifted.final_layernorm.weight.any()
    torch.testing.assert_close(shifted(tokens()), plain(tokens()))


def test_residual_after_norm_differs() -> None:
    post = build(config(apply_residual_connection_post_layernorm=True))
    assert not torch.allclose(post(tokens()), build(config())(tokens()), atol=1e-2)
    block, x = post.layers["0"], torch.randn(1, 3, 32)
    context = _context()
    normed = block.input_layernorm(x)
    middle = normed + block.self_attention(normed, context)
    normed = block.post_attention_layernorm(middle)
    torch.testing.assert_close(block(x, context), normed + block.mlp(normed))


def _context() -> Any:
    from megatron.model.attention import AttentionContext

    return AttentionContext()


@FAMILIES
def test_casting_the_model_keeps_the_rope_frequencies(family: dict[str, Any]) -> None:
    model = build(config(**LLAMA))
    before = model.rotary.inverse_frequencies.clone()
    for moved in (model.bfloat16(), model.double(), model.to("meta").to_empty(device="cpu")):
        assert torch.equal(moved.rotary.inverse_frequencies, before)
        assert moved.rotary.inverse_frequencies.dtype == torch.float32


def test_position_ids_are_used() -> None:
    for family in (GPT2, LLAMA):
        model = build(config(**family))
        shifted = torch.arange(24).unsqueeze(0) + 3
        default = model(tokens())
        assert torch.equal(model(tokens(), position_ids=torch.arange(24).expand(2, 24)), default)
        moved = model(tokens(), position_ids=shifted)
        # RoPE sees distances only, a learned table sees places.
        assert torch.allclose(moved, default, atol=1e-4) == (family is LLAMA)


def test_dropout_is_the_callable_that_was_given() -> None:
    calls = []

    def dropout(x: Tensor, p: float, training: bool) -> Tensor:
        calls.append((p, training))
        return x

    settings = config(hidden_dropout=0.25)
    make = ModuleFactory(settings, kernels := resolve("auto", "cpu"))
    make.dropout = dropout
    model = GPT(settings, vocab_size=VOCAB, kernels=kernels, make=make)
    initialise(model, 7)
    model(tokens())
    assert calls == [(0.25, True)] * (1 + 2 * 4)  # the embedding, and two branches per layer
    model.eval()
    model(tokens())
    assert calls[-1] == (0.25, False)


def test_a_factory_of_other_settings_is_an_error() -> None:
    """The factory makes every module, so other settings passed beside it would have no effect."""
    settings, kernels = config(), resolve("ref", "cpu")
    make = ModuleFactory(settings, kernels)
    for other in (
        {"config": config(num_layers=1)},
        {"kernels": resolve("auto", "cpu")},
        {"moe": MoEConfig(num_experts=2)},
        {"recompute": RecomputeConfig()},
    ):
        given: dict[str, Any] = {"config": settings, "kernels": kernels, "vocab_size": VOCAB, "make": make, **other}
        with pytest.raises(AssertionError, match="make: its settings differ"):
            GPT(**given)
    GPT(settings, kernels=kernels, vocab_size=VOCAB, make=make)


@FAMILIES
def test_no_dropout_in_evaluation(family: dict[str, Any]) -> None:
    model = build(config(**family, attention_dropout=0.5, hidden_dropout=0.5))
    assert not torch.equal(model(tokens()), model(tokens()))
    state = torch.get_rng_state()
    model.eval()
    torch.testing.assert_close(model(tokens()), build(config(**family)).eval()(tokens()), rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_submodules_can_be_replaced() -> None:
    model = build(config())

    class Core(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, visible: Visible) -> Tensor:
            return torch.zeros_like(query)

    class Head(torch.nn.Module):
        def forward(self, hidden: Tensor, weight: Tensor, labels: Tensor | None) -> Tensor:
            return hidden @ weight.t() * 2

    plain = model(tokens())
    model.head_and_loss = Head()
    torch.testing.assert_close(model(tokens()), 2 * plain)
    for block in model.layers.values():
        block.self_attention.core_attention = Core()
    first = model(tokens())
    changed = tokens()
    changed[:, 0] = (changed[:, 0] + 1) % VOCAB
    assert torch.equal(model(changed)[:, 1:], first[:, 1:])  # nothing looks at another token any more
