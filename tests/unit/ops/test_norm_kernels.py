"""Properties of norms that the table of proofs lacks: determinism across threads, the order of rounding, the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, ones

from megatron.errors import ConfigError
from megatron.ops.norm import rms_norm
from tests.helpers import kernels
from tests.helpers.declared import Refused
from tests.helpers.kernels import backend, strict

REFUSED: Refused = {
    "layer_norm": [
        ((ones(2, 4), ones(4), ones(5), 1e-5), "x float32 (2, 4) and a bias float32 (5,): the kernel needs one number")
    ],
    "rms_norm": [
        (
            (ones(2, 4), ones(5), 1e-5),
            "x float32 (2, 4) and a weight float32 (5,): the kernel needs one number per column of x",
        ),
        ((ones(2, 4), ones(1, 4), 1e-5), "a weight float32 (1, 4): the kernel needs one number per column of x"),
        ((ones(2, 4), ones(4, device="meta"), 1e-5), "tensors of cpu and meta: the kernel needs one device"),
    ],
    "add_layer_norm": [
        ((ones(2, 4), ones(1, 4), ones(4), None, 1e-5), "a residual float32 (1, 4): the kernel needs the same dtype")
    ],
    "add_rms_norm": [
        ((ones(2, 4), ones(2, 4), ones(3), 1e-5), "a weight float32 (3,): the kernel needs one number per column of x")
    ],
}


def kernel(name: str) -> Any:
    return kernels.kernel(name, backend("cpu").ops)


def gradients(threads: int, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        out = kernel("layer_norm")(*leaves, 1e-5)
        return torch.autograd.grad(out, leaves, x.sin())
    finally:
        torch.set_num_threads(before)


def test_gradients_of_weights_do_not_depend_on_the_number_of_threads() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(1111, 96), torch.randn(96), torch.randn(96)
    for one, three in zip(gradients(1, x, weight, bias), gradients(3, x, weight, bias)):
        assert torch.equal(one, three)


def test_gradients_of_weights_are_summed_in_fp32() -> None:
    """A sum kept in bf16 would stop growing at 256."""
    x = torch.ones(8192, 4, dtype=torch.bfloat16)
    weight = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    kernel("rms_norm")(x, weight, 0.0).sum().backward()
    assert weight.grad is not None and bool((weight.grad == 8192).all())


def test_rms_norm_rounds_before_the_gain() -> None:
    """Bits equal the plain formula's, unlike a kernel that rounds once. A few numbers may differ where the statistics
    differ in their last bit."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, 512).bfloat16(), (torch.randn(512) + 1).bfloat16()
    ours, plain = kernel("rms_norm")(x, weight, 1e-5), rms_norm(x, weight, 1e-5)
    once = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5) * weight.float()).bfloat16()
    assert (ours != plain).float().mean() < 1e-3
    assert (once != plain).float().mean() > 0.1


def test_a_sum_that_alone_is_used_still_has_its_gradient() -> None:
    x, residual = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
    weight = torch.ones(8, requires_grad=True)
    _, total = kernel("add_rms_norm")(x, residual, weight, 1e-5)
    grads = torch.autograd.grad(total.sum(), (x, residual, weight), allow_unused=True)
    assert grads[0] is not None and torch.equal(grads[0], torch.ones(3, 8))
    assert grads[1] is not None and torch.equal(grads[1], torch.ones(3, 8))
    assert grads[2] is None or not grads[2].any()


def test_a_sum_of_two_dtypes_is_refused_by_name() -> None:
    call = strict("add_rms_norm", backend("cpu").ops)
    with pytest.raises(ConfigError, match=r"add_rms_norm does not support x bfloat16 .*; use --kernels auto"):
        call(torch.ones(2, 4).bfloat16(), torch.ones(2, 4), torch.ones(4), 1e-5)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(5), "the weight must have the width of x"),
        (torch.ones(4).half(), "must have the type of x or float32"),
        (torch.ones(8)[::2], "the weight is not contiguous"),
    ],
)
def test_the_binding_checks_the_weight(weight: Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        backend("cpu").ops.norm_forward(torch.ones(2, 4), weight, None, 1e-5, False)
