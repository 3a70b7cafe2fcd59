"""The scalar functions of csrc/activation/math.h over their whole range, run by the kernels, against fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, ones

from tests.helpers.declared import Refused
from tests.helpers.kernels import backend, kernel

REFUSED: Refused = {
    "gelu": [((ones(2, 4, dtype=torch.int64), True), "int64 (2, 4): the kernel needs float32, bfloat16 or float16")],
    "swiglu": [
        ((ones(2, 4, dtype=torch.float64),), "float64 (2, 4): the kernel needs float32, bfloat16 or float16"),
        ((ones(2, 5),), "float32 (2, 5): the kernel needs an even last dimension"),
        ((ones(()),), "float32 (): the kernel needs an even last dimension"),
    ],
    "geglu": [((ones(2, 5), True), "float32 (2, 5): the kernel needs an even last dimension")],
    "squared_relu": [
        ((ones(2, 4, dtype=torch.complex64),), "complex64 (2, 4): the kernel needs float32, bfloat16 or float16")
    ],
}


SMALLEST = torch.finfo(torch.float32).smallest_normal


def every_bf16() -> Tensor:
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)


def dense_fp32() -> Tensor:
    """Every 997th finite fp32 number, subnormals included, and a dense grid where the functions bend."""
    bits = torch.arange(0, 0x7F800000, 997, dtype=torch.int64)
    positive = bits.to(torch.int32).view(torch.float32)
    return torch.cat([positive, -positive, torch.linspace(-110.0, 110.0, 2_000_000), torch.linspace(-6, 6, 2_000_000)])


def exact_gelu(x: Tensor, tanh: bool) -> Tensor:
    """GELU in fp64. Avoids the cancellation far below zero of the usual formula."""
    if tanh:
        return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return x * 0.5 * torch.special.erfc(-x * math.sqrt(0.5))


FUNCTIONS = {
    "gelu_tanh": (lambda ops, x: kernel("gelu", ops)(x, True), lambda x: exact_gelu(x, True)),
    "gelu_erf": (lambda ops, x: kernel("gelu", ops)(x, False), lambda x: exact_gelu(x, False)),
    "silu": (
        lambda ops, x: kernel("swiglu", ops)(torch.stack((x, torch.ones_like(x)), -1))[..., 0],
        lambda x: x * torch.sigmoid(x),
    ),
    "squared_relu": (lambda ops, x: kernel("squared_relu", ops)(x), lambda x: torch.relu(x).square()),
}


def value_and_slope(function: object, x: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    value = function(leaf)  # type: ignore[operator]
    (slope,) = torch.autograd.grad(value, leaf, torch.ones_like(value))
    return value.detach().double(), slope.double()


# Slopes cross zero, where the error is compared with the size of the summands.
@pytest.mark.parametrize("name", FUNCTIONS)
def test_dense_fp32_within_a_millionth(name: str) -> None:
    ours, exact = FUNCTIONS[name]
    ops, x = backend("cpu").ops, dense_fp32()
    x = x[(x.abs() < 1e19) & (x > -80)]  # beyond, squares overflow; far below zero see the next test
    value, slope = value_and_slope(lambda t: ours(ops, t), x)
    want, want_slope = value_and_slope(exact, x.double())
    assert bool((value - want).abs().le(1e-6 * want.abs().clamp(min=1e-2)).all())
    assert bool((slope - want_slope).abs().le(2e-6 * want_slope.abs().clamp(min=1.0)).all())


def test_far_below_zero_the_relative_accuracy_stays() -> None:
    """Tests where 1 + erf and 1 + tanh have no digits left, down to where exp(-87) is cut off."""
    ops = backend("cpu").ops
    for name, lowest, limit in (("gelu_erf", -13.0, 2e-6), ("gelu_tanh", -9.9, 2e-5), ("silu", -87.0, 2e-5)):
        x = torch.linspace(lowest, -1.0, 1_000_000)
        ours, exact = FUNCTIONS[name]
        want = exact(x.double())
        error = (ours(ops, x).double() - want).abs() / want.abs()
        assert float(error[want.abs() > SMALLEST].max()) < limit, name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_bf16(name: str) -> None:
    """All 65536 values, rounded once; NaN stays NaN, an infinite result is infinite, 0 stays 0."""
    ours, exact = FUNCTIONS[name]
    x = every_bf16()
    got, want = ours(backend("cpu").ops, x), exact(x.double())
    finite = (want.abs() < 3e38) & (want.abs() > SMALLEST)
    distance = (got[finite].double() - want[finite]).abs() / want[finite].abs()
    usable = x[finite].double() > -9.9  # further down see the test in fp32
    assert float(distance[usable].max()) <= 2**-8 * 1.01
    assert torch.equal(got[x.isnan()].isnan(), x[x.isnan()].isnan())
    assert bool((got[x == math.inf] == math.inf).all())
    zero = x == 0
    assert bool((got[zero] == 0).all())
