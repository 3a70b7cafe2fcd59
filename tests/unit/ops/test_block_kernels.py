"""Putting together the gradients of attention in blocks: what does not fit is refused, planted bugs are seen. And
thirds of one tensor, where a plain split would copy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.ops.fused_qkv import empty_thirds, split_qkv, whole
from tests.helpers.kernels import backend
from tests.helpers.planted import Mistake


def test_what_does_not_fit_is_refused() -> None:
    ops = backend("cpu").ops
    grad, parts = torch.empty(1, 2, 8, 4), torch.empty(64)
    seen = torch.empty(2 * (4 + 8) * 4)
    for arguments, message in (
        ((grad, grad, grad, parts, seen, parts, 4, True), "not the size and type"),
        ((grad, grad, grad, parts.bfloat16(), seen, seen, 4, True), "not the size and type"),
        ((grad, grad, grad[:, :1], parts, seen, seen, 4, True), "number of heads"),
        ((grad, grad.bfloat16(), grad, parts, seen, seen, 4, True), "differ in more than"),
        ((grad, grad[:, :, :7], grad, parts, seen, seen, 4, True), "differ in more than"),
        ((grad.transpose(2, 3), grad, grad, parts, seen, seen, 4, True), "side by side"),
        ((grad, grad, grad, parts, seen, seen, 0, True), "no queries"),
        ((grad.double(), grad, grad, parts, seen, seen, 4, True), "differ in more than"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.block_gradients_(*arguments)


MISTAKES = {
    "a block's own keys only": ("if (first < a.keys_of(i)) add_run", "if (which == i) add_run"),
    "the first head's keys for all": ("batch * to.heads + head) * a.keys_of(i)", "batch * to.heads) * a.keys_of(i)"),
    "queries of the block before": ("heads * which * a.block", "heads * (which > 0) * a.block"),
    "not from zero": ("std::fill(total, total + count, 0.0f);", ""),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_planted_bugs_are_seen(tmp_path: Path, name: str) -> None:
    Mistake("cpu/blocks.cpp", *MISTAKES[name], "block_gradients").must_be_seen(tmp_path)


def test_thirds_are_found_again() -> None:
    thirds = empty_thirds(torch.empty(2, 5, 3, 4))
    joined = whole(thirds)
    assert joined is not None and joined.shape == (2, 5, 3, 3, 4) and joined.is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(joined.fill_(7.0).unbind(3), thirds, strict=True))


def test_what_is_not_thirds_is_not_taken_for_them() -> None:
    query, key, value = empty_thirds(torch.empty(2, 5, 3, 4))
    other = empty_thirds(torch.empty(2, 5, 3, 4))
    for three in (
        (key, query, value),
        (query, query, value),
        (query, key, other[2]),
        (query.clone(), key.clone(), value.clone()),
        (query[:1], key[:1], value),
        (query[:, ::2], key[:, ::2], value[:, ::2]),
        (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)),
    ):
        assert whole(three) is None


@pytest.mark.parametrize("together", [True, False])
def test_the_gradient_of_a_split(together: bool) -> None:
    """Of thirds of one tensor it is that tensor, not a copy."""
    qkv = torch.randn(2, 5, 3, 3, 4, dtype=torch.float64, requires_grad=True)
    grads = empty_thirds(torch.empty(2, 5, 3, 4, dtype=torch.float64))
    for grad in grads:
        grad.normal_()
    given = grads if together else tuple(grad.clone() for grad in grads)
    (got,) = torch.autograd.grad(split_qkv(qkv), qkv, given)
    assert torch.equal(got, torch.stack(grads, dim=3))
    assert (got.data_ptr() == grads[0].data_ptr()) is together


@pytest.mark.parametrize("per_group", [1, 2])
def test_a_split_has_every_derivative(per_group: int) -> None:
    qkv = torch.randn(1, 2, 2, per_group + 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: split_qkv(x * x), qkv)
    whole_width = torch.cat([part.flatten(2) for part in split_qkv(qkv)], -1)
    assert whole_width.shape == (1, 2, 2 * (per_group + 2) * 3)
