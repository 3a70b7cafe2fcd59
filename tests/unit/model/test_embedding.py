"""The tied embedding, which is both looked up and multiplied: one gradient, equal to the composed one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.model import table
from megatron.model.table import look_up_and_share
from tests.unit.model.helpers import GPT2, build, config, tokens

ROWS, WIDTH = 50, 8
IDS = torch.tensor([[3, 3, 3, 49], [0, 3, 7, 7]])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gradient(shared: bool, dtype: torch.dtype, *, use_head: bool = True, use_rows: bool = True) -> Tensor:
    table = drawn(ROWS, WIDTH).to(dtype).requires_grad_()
    x, upstream = drawn(6, WIDTH, seed=1).to(dtype), drawn(*IDS.shape, WIDTH, seed=2).to(dtype)
    rows, head = look_up_and_share(table, IDS) if shared else (F.embedding(IDS, table), table)
    outputs = [(x @ head.t()).sum()] if use_head else []
    outputs += [(rows * upstream).sum()] if use_rows else []
    sum(outputs).backward()  # type: ignore[union-attr]
    assert table.grad is not None
    return table.grad


@pytest.mark.parametrize(("use_head", "use_rows"), [(True, True), (True, False), (False, True)])
def test_the_gradient_is_the_composed_one(use_head: bool, use_rows: bool) -> None:
    shared, composed = (gradient(way, torch.float64, use_head=use_head, use_rows=use_rows) for way in (True, False))
    torch.testing.assert_close(shared, composed, rtol=1e-14, atol=1e-14)


def test_in_bf16_it_is_rounded_once() -> None:
    exact = gradient(False, torch.float64)
    errors = [(gradient(way, torch.bfloat16).double() - exact).norm() for way in (True, False)]
    assert errors[0] <= 1.1 * errors[1]


def test_the_gradient_agrees_with_finite_differences() -> None:
    x = drawn(6, WIDTH, seed=1)

    def f(table: Tensor) -> Tensor:
        rows, head = look_up_and_share(table, IDS)
        return (x @ head.t()).tanh().sum() + rows.sin().sum()

    assert torch.autograd.gradcheck(f, drawn(ROWS, WIDTH).requires_grad_())


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_tied_model_has_the_gradients_of_the_composed_one(
    micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grads = []
    for shared in (True, False):
        model = build(config(**GPT2), dtype=torch.float64)
        if not shared:
            monkeypatch.setattr(type(model), "_look_up", lambda self, tokens: (None, None))
        for seed in range(micro_batches):
            model(tokens(seed=seed), labels=tokens(seed=seed + 10)).sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-10, atol=1e-12, msg=name)


def test_the_model_takes_that_path_and_a_frozen_or_untied_table_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    apply = table._LookUpAndShare.apply
    monkeypatch.setattr(table._LookUpAndShare, "apply", lambda *args: calls.append(1) or apply(*args))
    model = build(config(**GPT2))
    model(tokens(), labels=tokens(seed=1)).sum().backward()
    assert len(calls) == 1
    model(tokens())
    assert model.embedding is not None
    model.embedding.word_embeddings.weight.requires_grad_(False)
    model(tokens(), labels=tokens(seed=1)).sum().backward()
    untied = build(config(**GPT2, untie_embeddings_and_output_weights=True))
    untied(tokens(), labels=tokens(seed=1)).sum().backward()
    assert len(calls) == 1
