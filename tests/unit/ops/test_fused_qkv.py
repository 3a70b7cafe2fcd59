"""Thirds of one tensor stay views where a plain split would copy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.ops.fused_qkv import Triple, split_qkv, whole


def empty_thirds(like: Tensor) -> Triple:
    batch, seq, heads, width = like.shape
    query, key, value = like.new_empty(batch, seq, heads, 3, width).unbind(3)
    return query, key, value


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
    """The gradient of thirds of one tensor is that tensor, not a copy."""
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
