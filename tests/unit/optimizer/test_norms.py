"""Norms and counts compared with double precision."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.optimizer.norms import count_zeros, global_norm, global_zeros, row_norms, sum_of_squares


@pytest.mark.parametrize("shapes", [[(1,)], [(4096,)], [(4097,), (3, 5)], [(10_000,), (64, 64), (0,), (1, 4096)]])
def test_norm_is_torchs(shapes: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    wanted = torch.cat([tensor.flatten() for tensor in tensors]).norm().item()
    assert global_norm({(): tensors}).item() == pytest.approx(wanted, rel=1e-14)


def test_a_large_fp32_tensor_loses_nothing() -> None:
    torch.manual_seed(0)
    tensor = torch.randn(10_000_000) + 1.0
    wanted = tensor.double().norm().item()
    assert global_norm({(): [tensor]}).item() == pytest.approx(wanted, rel=1e-7)


def test_the_norm_does_not_depend_on_the_order_of_parameters() -> None:
    tensors = [torch.randn(n) for n in (5000, 3, 70, 9000)]
    assert global_norm({(): tensors}).item() == pytest.approx(global_norm({(): tensors[::-1]}).item(), rel=1e-15)


def test_non_contiguous_tensors() -> None:
    tensor = torch.randn(70, 80).t()
    assert global_norm({(): [tensor]}).item() == pytest.approx(tensor.double().norm().item(), rel=1e-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 4095, 4096, 5000])
def test_one_bad_element_is_seen(bad: float, place: int) -> None:
    tensor = torch.zeros(5001)
    tensor[place] = bad
    assert not math.isfinite(global_norm({(): [torch.ones(3), tensor]}))


def test_a_sum_that_overflows_fp32_is_not_a_bad_element() -> None:
    tensors = [torch.full((5000,), 3e30)]
    assert sum_of_squares(tensors).item() == pytest.approx(5000 * 9e60, rel=1e-6)


def test_nothing_has_norm_zero() -> None:
    assert global_norm({}).item() == 0.0 and global_norm({(): []}).item() == 0.0 and row_norms(torch.zeros(0)) == []


def test_zeros() -> None:
    tensors = [torch.tensor([0.0, 1.0, -0.0]), torch.zeros(2, 2), torch.ones(5)]
    assert count_zeros(tensors) == 6 == global_zeros({(): tensors})
