from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.config import MoEConfig, RecomputeConfig
from megatron.model.gpt import GPT
from megatron.model.recompute import Recomputation, groups
from tests.unit.model.helpers import GPT2, LLAMA, build, config, tokens

PLANS: list[dict[str, Any]] = [
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 3},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 9},
    {"recompute_granularity": "selective"},
    {"recompute_activations": True},
    {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp")},
    {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
    {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm", "mlp")},
]


def changed(model: GPT) -> GPT:
    """Adds noise to all weights, so that no two norms are alike."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("family", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_bit_equal_with_dropout(family: dict[str, Any], plan: dict[str, Any]) -> None:
    results = []
    for recompute in (None, RecomputeConfig(**plan)):
        model = changed(build(config(**family, attention_dropout=0.1, hidden_dropout=0.1), recompute=recompute))
        torch.manual_seed(3)
        loss = model(tokens(), labels=tokens(seed=1))
        loss.mean().backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters()), torch.get_rng_state()])
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [(PLANS[0], 4), (PLANS[1], 2), (PLANS[2], 2), (PLANS[3], 4), (PLANS[4], 4), (PLANS[6], 4), (PLANS[7], 8)],
)
def test_what_is_recomputed(plan: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counting(function: Any, *arguments: Any, **_: Any) -> Any:
        calls.append(function)
        return function(*arguments)

    monkeypatch.setattr("megatron.model.recompute.checkpoint", counting)
    model = build(config(), recompute=RecomputeConfig(**plan))
    model(tokens())
    assert len(calls) == expected
    with torch.no_grad():
        model(tokens())
    assert len(calls) == expected  # nothing is kept, so nothing is promised


def kept_bytes(model: GPT) -> int:
    """Bytes that a forward pass keeps for the backward pass, without the weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens(), labels=tokens(seed=1))
    del loss
    return sum(kept.values())


@pytest.mark.parametrize("experts", [False, True], ids=["mlp", "moe"])
def test_recomputed_parts_keep_only_their_input(experts: bool) -> None:
    moe = MoEConfig(num_experts=4, moe_ffn_hidden_size=64) if experts else None
    part = "moe" if experts else "mlp"
    plans: list[dict[str, Any]] = [{}, {"recompute_granularity": "selective", "recompute_modules": (part,)}]
    if experts:
        plans.append({"moe_layer_recompute": True})
    sizes = [kept_bytes(build(config(**LLAMA), moe=moe, recompute=RecomputeConfig(**plan))) for plan in plans]
    assert all(size < 0.8 * sizes[0] for size in sizes[1:]), sizes


def test_groups_cover_every_layer_once() -> None:
    for plan in ({}, *PLANS):
        for chunk in (1, 2, 3, 7):
            found = groups(replace(RecomputeConfig(**plan), recompute_num_layers=chunk), 5)
            assert [n for positions, _ in found for n in positions] == list(range(5))


def alive_after_forward(modules: tuple[str, ...], moe: MoEConfig | None = None, **settings: Any) -> dict[str, int]:
    """Numbers of outputs of norms and of the experts' activation functions that a forward pass keeps alive."""
    plan = {"recompute_granularity": "selective", "recompute_modules": modules}
    model = build(config(**LLAMA, **settings), recompute=RecomputeConfig(**plan) if modules else None, moe=moe)
    outputs: dict[str, list[StorageWeakRef]] = {"norm": [], "activation": []}

    def noted(kind: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            first = result[0] if isinstance(result, tuple) else result
            outputs[kind].append(StorageWeakRef(first.untyped_storage()))
            return result

        return call

    for layer in model.layers.values():
        for name in ("input_layernorm", "post_attention_layernorm"):
            norm = getattr(layer, name)
            norm.forward, norm.of_sum = noted("norm", norm.forward), noted("norm", norm.of_sum)
        if moe is not None:
            for expert in layer.mlp.experts.values():
                expert.activate = noted("activation", expert.activate)
    loss = model(tokens(), labels=tokens(seed=1)).sum()
    gc.collect()
    alive = {kind: sum(not one.expired() for one in some) for kind, some in outputs.items()}
    made = {kind: len(some) for kind, some in outputs.items()}
    loss.backward()
    again = {kind: len(some) - made[kind] for kind, some in outputs.items()}
    assert again == {kind: made[kind] - alive[kind] for kind in made}, "what is not kept is computed again, once"
    return alive


EXPERTS = MoEConfig(num_experts=4, moe_ffn_hidden_size=64)


@pytest.mark.parametrize("parallel", [False, True])
def test_outputs_of_norms_are_not_kept(parallel: bool) -> None:
    for modules, alive in (((), 8), (("layernorm",), 0), (("layernorm", "mlp"), 0)):
        assert alive_after_forward(modules, use_parallel_residual=parallel)["norm"] == alive, modules


def test_outputs_of_the_experts_activation_are_not_kept() -> None:
    for modules, alive in (((), 4), (("moe_act",), 0), (("layernorm",), 4)):
        assert alive_after_forward(modules, EXPERTS)["activation"] == alive, modules


@pytest.mark.parametrize("modules", [("layernorm",), ("moe_act",), ("layernorm", "moe_act")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_bit_equal(modules: tuple[str, ...], dtype: torch.dtype) -> None:
    results = []
    for plan in ({}, {"recompute_granularity": "selective", "recompute_modules": modules}):
        model = build(config(**LLAMA, hidden_dropout=0.1), recompute=RecomputeConfig(**plan), moe=EXPERTS, dtype=dtype)
        torch.manual_seed(3)
        model(tokens(), labels=tokens(seed=1)).mean().backward()
        results.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(plain, recomputed) for plain, recomputed in zip(*results, strict=True))


class Saving(torch.autograd.Function):
    """Saves a tensor; backward returns it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
        ctx.save_for_backward(saved)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.saved_tensors[0].double().sum() * grad, None


@pytest.mark.parametrize(
    ("view", "replaced"),
    [
        (lambda value: value, True),
        (lambda value: value.view(4, 6), True),
        (lambda value: value[:1], False),
        (lambda value: value[1:], False),
        (lambda value: value.t(), False),
        (lambda value: value.view(torch.int32), False),
        (lambda value: value.clone(), False),
    ],
)
def test_only_the_whole_value_is_replaced(view: Any, replaced: bool) -> None:
    value, x, calls = torch.arange(24.0).view(2, 12), torch.ones(1, requires_grad=True), []
    expected = view(value).double().sum()
    with Recomputation().instead_of(value, lambda: calls.append(1) or value + 1, recomputed=True):  # type: ignore[func-returns-value]
        y = Saving.apply(x, view(value))
    y.sum().backward()
    assert bool(calls) == replaced
    assert x.grad is not None and x.grad.item() == (24 if replaced else 0) + expected


def test_another_value_than_the_first_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: recomputes the norm of something else."""
    plan = {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)}
    plain, wrong = (build(config(), recompute=RecomputeConfig(**plan)) for _ in range(2))
    plain(tokens(), labels=tokens(seed=1)).sum().backward()
    right = Recomputation.instead_of
    monkeypatch.setattr(
        Recomputation, "instead_of", lambda self, x, again, on: right(self, x, lambda: again() * 1.01, on)
    )
    wrong(tokens(), labels=tokens(seed=1)).sum().backward()
    pairs = zip(plain.parameters(), wrong.parameters(), strict=True)
    assert not all(torch.equal(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None)


# ---- values that a recomputation takes from the first time ----------------------------------------------------------


class Scaled:
    """Multiplies by numbers that `once` reads; counts the reads."""

    def __init__(self, recomputation: Recomputation) -> None:
        self.recomputation, self.read, self.calls = recomputation, 0, 0

    def next(self) -> int:
        self.read += 1
        return self.read

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        factors = [self.recomputation.once(self.next) for _ in range(2)]
        return (x * factors[0]).sin() * factors[1]


def gradient(recomputed: bool, calls: int = 3, nested: bool = False) -> tuple[Tensor, Scaled]:
    recomputation = Recomputation()
    scaled = Scaled(recomputation)

    def outer(x: Tensor) -> Tensor:
        return recomputation.call(scaled, nested, x)

    x = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
    sum(recomputation.call(outer, recomputed, x).sum() for _ in range(calls)).backward()
    assert x.grad is not None
    return x.grad, scaled


def test_a_recomputation_reads_nothing_again() -> None:
    plain, once = gradient(False)
    again, twice = gradient(True)
    assert torch.equal(plain, again)
    assert (once.calls, once.read) == (3, 6) and (twice.calls, twice.read) == (6, 6)


def test_nested_recomputations_read_nothing_again() -> None:
    plain, _ = gradient(False)
    again, scaled = gradient(True, nested=True)
    assert torch.equal(plain, again) and scaled.calls > 3 and scaled.read == 6


def test_without_gradients_nothing_is_kept() -> None:
    recomputation = Recomputation()
    scaled = Scaled(recomputation)
    with torch.no_grad():
        for _ in range(2):
            recomputation.call(scaled, True, torch.ones(1))
    assert scaled.read == 4 and recomputation._kept is None and recomputation._again is None


def test_an_error_leaves_no_open_recording() -> None:
    recomputation = Recomputation()

    def failing(x: Tensor) -> Tensor:
        recomputation.once(lambda: 1)
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        recomputation.call(failing, True, torch.ones(1, requires_grad=True))
    assert recomputation._kept is None and recomputation._again is None
