"""Attention in blocks of queries: several blocks, a short last one, shared keys, masks, dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.ops import blocked_attention as module
from megatron.ops.attention import attention
from megatron.ops.blocked_attention import blocked_attention


def inputs(seq: int, heads: int, groups: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(seq)
    shapes = [(2, seq, heads, 8), (2, seq, groups, 8), (2, seq, groups, 8)]
    # Not contiguous, like outputs of the fused projection.
    return [torch.randn(shape, dtype=torch.float64).to(dtype).transpose(1, 2).requires_grad_() for shape in shapes]


def results(function: Any, tensors: list[Tensor], **options: Any) -> list[Tensor]:
    out = function(*tensors, **({"mask": None, "causal": True, "scale": 0.4} | options))
    return [out.detach(), *torch.autograd.grad(out, tensors, torch.ones_like(out).cumsum(-1))]


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("seq", [2, 64, 65, 130, 300])
def test_equals_the_formula(seq: int, heads: int, groups: int) -> None:
    tensors = inputs(seq, heads, groups)
    for fast, slow in zip(results(blocked_attention, tensors), results(attention, tensors), strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-11, atol=1e-12)


def masks(seq: int) -> dict[str, tuple[Tensor, bool]]:
    window = torch.ones(seq, seq, dtype=torch.bool).triu(-9)
    documents = torch.arange(seq).div(23, rounding_mode="floor") + torch.tensor([[0], [seq]])
    same = documents[:, None, :, None] == documents[:, None, None, :]
    per_head = torch.rand(2, 4, seq, seq) < 0.5
    per_head |= torch.eye(seq, dtype=torch.bool)
    return {
        "window": (window[None, None], True),
        "documents": (same & window.tril(), False),
        "documents_and_causal": (same, True),
        "per_head": (per_head, False),
        "everything": (torch.ones(seq, seq, dtype=torch.bool), False),
    }


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("name", masks(2))
def test_masks(name: str, groups: int) -> None:
    tensors = inputs(130, 4, groups)
    mask, causal = masks(130)[name]
    fast = results(blocked_attention, tensors, mask=mask, causal=causal)
    for got, want in zip(fast, results(attention, tensors, mask=mask, causal=causal), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", masks(2))
@pytest.mark.parametrize("seq", [65, 300, 600])
def test_half_and_single_precision(seq: int, name: str) -> None:
    mask, causal = masks(seq)[name]
    options = {"mask": mask, "causal": causal}
    for dtype, limit in ((torch.float32, 2e-6), (torch.bfloat16, 8e-3)):
        tensors = inputs(seq, 4, 2, dtype)
        exact = results(attention, [t.detach().double().requires_grad_() for t in tensors], **options)
        for got, want in zip(results(blocked_attention, tensors, **options), exact, strict=True):
            assert (got.double() - want).norm() / want.norm() < limit


def test_two_runs_are_bit_equal() -> None:
    tensors = inputs(300, 4, 2, torch.bfloat16)
    runs = [results(blocked_attention, tensors) for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


softmax_, softmax_backward_ = module._softmax_, module._softmax_backward_

BUGS: dict[str, tuple[str, Any]] = {
    "one key too many": (
        "_softmax_",
        lambda scores, mask, diagonal, scale: softmax_(scores, mask, diagonal + 1, scale),
    ),
    "gradient not scaled": ("_softmax_backward_", lambda grad, weights, scale: softmax_backward_(grad, weights, 1.0)),
    "mask forgotten": ("_softmax_", lambda scores, mask, diagonal, scale: softmax_(scores, None, diagonal, scale)),
    "last block skipped": (
        "_softmax_",
        lambda scores, mask, *rest: softmax_(scores, mask, *rest) if scores.shape[2] == 64 else None,
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, *BUGS[bug])
    tensors, (mask, causal) = inputs(130, 4, 2), masks(130)["documents_and_causal"]
    fast = results(blocked_attention, tensors, mask=mask, causal=causal)
    slow = results(attention, tensors, mask=mask, causal=causal)
    assert not all(torch.allclose(got, want, rtol=1e-9, atol=1e-9) for got, want in zip(fast, slow, strict=True))


def test_bf16_error_is_that_of_the_formula_in_bf16() -> None:
    exact = results(attention, [t.bfloat16().double().requires_grad_() for t in inputs(300, 4, 2)])
    half = [t.detach().bfloat16().requires_grad_() for t in inputs(300, 4, 2)]
    pairs = zip(results(blocked_attention, half), results(attention, half), exact, strict=True)
    for got, formula, want in pairs:
        error, allowed = ((t.double() - want).norm() / want.norm() for t in (got, formula))
        assert error <= 1.2 * allowed


@pytest.mark.parametrize("dropout_p", [0.3, 1.0])
def test_gradients_under_dropout(dropout_p: float) -> None:
    def fixed(*tensors: Tensor) -> Tensor:
        torch.manual_seed(0)  # the same elements fall in every evaluation
        return blocked_attention(*tensors, mask=None, causal=True, scale=0.4, dropout_p=dropout_p)

    assert torch.autograd.gradcheck(fixed, inputs(5, 2, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_backward_drops_what_forward_dropped(dtype: torch.dtype) -> None:
    """The output is linear in the values, so <values, their gradient> = <output, its gradient> in every dtype."""
    tensors = inputs(130, 4, 2, dtype)
    out = blocked_attention(*tensors, mask=None, causal=True, scale=0.4, dropout_p=0.3)
    upstream = torch.randn_like(out)
    grads = torch.autograd.grad(out, tensors, upstream)
    assert all(grad.dtype == dtype for grad in grads)
    left, right = (tensors[2] * grads[2]).double().sum(), (out * upstream).double().sum()
    scale = (out * upstream).double().norm()
    assert abs(left - right) < {torch.bfloat16: 3e-1, torch.float32: 1e-4, torch.float64: 1e-11}[dtype] * scale


def test_dropout_scales_what_is_left() -> None:
    tensors = inputs(200, 4, 4)
    kept = blocked_attention(*tensors, mask=None, causal=True, scale=0.4)
    dropped = [
        blocked_attention(*tensors, mask=None, causal=True, scale=0.4, dropout_p=0.25).detach() for _ in range(200)
    ]
    error = (torch.stack(dropped).mean(0) - kept).norm() / kept.norm()
    assert error < 0.1


@pytest.mark.parametrize(
    ("queries", "keys", "dtype"),
    [
        (1025, 1025, torch.float32),
        (2049, 2049, torch.bfloat16),
        (3, 9, torch.float32),
        (1, 1, torch.float32),
        (8, 8, torch.float16),
    ],
)
def test_other_shapes_are_left_to_torch(
    queries: int, keys: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def spy(*tensors: Tensor, **options: Any) -> Tensor:
        calls.append(options)
        return tensors[0]

    monkeypatch.setattr(module, "sdpa", spy)
    query, key = torch.zeros(1, 2, queries, 4, dtype=dtype), torch.zeros(1, 2, keys, 4, dtype=dtype)
    blocked_attention(query, key, key, mask=None, causal=True, scale=1.0)
    assert len(calls) == 1
