from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, ones

from megatron.ops import logits
from megatron.ops.linear_cross_entropy import Workspace, fused_linear_cross_entropy, linear_cross_entropy
from tests.helpers.declared import Refused

LABELS = torch.zeros(3, dtype=torch.int64)
REFUSED: Refused = {
    "linear_cross_entropy": [
        ((ones(3, 4), ones(8, 5), LABELS, 8), "hidden float32 (3, 4), weight float32 (8, 5) and labels int64 (3,)"),
        ((ones(4, 4), ones(8, 4), LABELS, 8), "needs [tokens, hidden], [vocabulary, hidden] and int64 [tokens]"),
    ],
}


def inputs(
    tokens: int, hidden: int, vocab: int, rows: int, dtype: torch.dtype, std: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(tokens + vocab)
    x = torch.randn(tokens, hidden, dtype=torch.float64).to(dtype).requires_grad_()
    weight = (torch.randn(rows, hidden, dtype=torch.float64) * std).to(dtype).requires_grad_()
    return x, weight, torch.randint(vocab, (tokens,))


def gradients(function, x: Tensor, weight: Tensor, labels: Tensor, vocab: int, upstream: Tensor) -> list[Tensor]:  # type: ignore[no-untyped-def]
    loss = function(x, weight, labels, vocab)
    return [loss.detach(), *torch.autograd.grad(loss, (x, weight), upstream)]


@pytest.mark.parametrize(("tokens", "vocab", "rows"), [(7, 11, 11), (1, 2, 2), (13, 50, 64), (33, 257, 384), (5, 1, 4)])
def test_equals_the_formula_in_fp64(tokens: int, vocab: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits, "block_rows", lambda columns, device: 4)  # several blocks, the last one short
    x, weight, labels = inputs(tokens, 6, vocab, rows, torch.float64)
    upstream = torch.randn(tokens, dtype=torch.float64)
    upstream[::3] = 0.0  # masked tokens
    for fast, slow in zip(
        gradients(fused_linear_cross_entropy, x, weight, labels, vocab, upstream),
        gradients(linear_cross_entropy, x, weight, labels, vocab, upstream),
        strict=True,
    ):
        torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)


def test_gradcheck() -> None:
    x, weight, labels = inputs(5, 4, 9, 12, torch.float64)
    assert torch.autograd.gradcheck(lambda a, b: fused_linear_cross_entropy(a, b, labels, 9), (x, weight))


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_only_the_gradients_asked_for(needs: tuple[bool, bool]) -> None:
    x, weight, labels = inputs(5, 4, 9, 12, torch.float64)
    x.requires_grad_(needs[0])
    weight.requires_grad_(needs[1])
    fused_linear_cross_entropy(x, weight, labels, 9).sum().backward()
    assert (x.grad is not None, weight.grad is not None) == needs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precision_no_worse_than_composing_torch(dtype: torch.dtype) -> None:
    x, weight, labels = inputs(64, 32, 1003, 1024, dtype, std=0.3)
    scale = 2.0**10 if dtype == torch.float16 else 1.0
    upstream = torch.full((64,), scale / 64)

    def composed(x: Tensor, weight: Tensor, labels: Tensor, vocab: int) -> Tensor:
        return F.cross_entropy((x @ weight[:vocab].t()).float(), labels, reduction="none")

    exact = gradients(
        linear_cross_entropy,
        x.detach().double().requires_grad_(),
        weight.detach().double().requires_grad_(),
        labels,
        1003,
        upstream.double(),
    )
    ours = gradients(fused_linear_cross_entropy, x, weight, labels, 1003, upstream)
    theirs = gradients(composed, x, weight, labels, 1003, upstream)
    for got, other, want in zip(ours, theirs, exact, strict=True):
        error, reference = ((t.double() - want).norm() / want.norm() for t in (got, other))
        assert error <= 1.5 * reference + 1e-7
    assert ours[0].dtype == torch.float32


def test_large_logits_neither_overflow_nor_vanish() -> None:
    x = torch.tensor([[1000.0], [-1000.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.5], [-1.0]], requires_grad=True)
    loss = fused_linear_cross_entropy(x, weight, torch.tensor([2, 2]), 3)
    torch.testing.assert_close(loss, torch.tensor([2000.0, 0.0]))
    loss.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


def test_a_nan_stays_a_nan() -> None:
    x, weight, labels = inputs(3, 4, 9, 9, torch.float32)
    with torch.no_grad():
        x[1, 2] = float("nan")
    loss = fused_linear_cross_entropy(x, weight, labels, 9)
    assert loss.isnan().tolist() == [False, True, False]


def test_without_gradients_it_is_the_same_loss() -> None:
    x, weight, labels = inputs(600, 4, 9, 12, torch.float32)
    with torch.no_grad():
        evaluated = fused_linear_cross_entropy(x, weight, labels, 9)
    torch.testing.assert_close(
        evaluated, fused_linear_cross_entropy(x, weight, labels, 9).detach(), rtol=1e-6, atol=1e-6
    )


def test_the_workspace_is_used_again_and_never_shared() -> None:
    workspace = Workspace()
    x, weight, labels = inputs(5, 4, 9, 9, torch.float32)
    first = fused_linear_cross_entropy(x, weight, labels, 9, workspace)
    second = fused_linear_cross_entropy(x, weight, labels, 9, workspace)  # before the first one's backward pass
    expected = torch.autograd.grad(linear_cross_entropy(x, weight, labels, 9).sum(), weight)[0]
    for loss in (second, first):
        torch.testing.assert_close(torch.autograd.grad(loss.sum(), weight)[0], expected, rtol=1e-5, atol=1e-6)
    kept = workspace.take((5, 9), x)
    workspace.give_back(kept)
    assert workspace.take((5, 9), x) is kept
    workspace.give_back(kept)
    assert workspace.take((6, 9), x) is not kept
    assert copy.deepcopy(workspace)._spare is None
    assert pickle.loads(pickle.dumps(workspace))._spare is None


def test_a_second_backward_pass_with_a_workspace_is_refused() -> None:
    x, weight, labels = inputs(5, 4, 9, 9, torch.float32)
    loss = fused_linear_cross_entropy(x, weight, labels, 9, Workspace()).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="one backward pass"):
        loss.backward()
