"""fp16 on a processor without fp16 products: multiplied in fp32, rounded once, other types untouched."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from megatron.utils import fp16_products


@pytest.fixture
def in_fp32() -> Iterator[None]:
    fp16_products.multiply_in_fp32.cache_clear()
    assert "computed in fp32" in fp16_products.set_fp16_products(has=lambda: False)
    yield
    table = fp16_products.multiply_in_fp32()
    fp16_products.multiply_in_fp32.cache_clear()
    table._destroy()


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).half()


A, B, C = drawn(6, 64), drawn(64, 5), drawn(6, 5)
PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "mm": lambda a, b, c: a @ b,
    "transposed": lambda a, b, c: (b.t() @ a.t()).t(),
    "mm out": lambda a, b, c: torch.mm(a, b, out=torch.empty_like(c)),
    "mm out of another shape": lambda a, b, c: torch.mm(a, b, out=c.new_empty(0)),
    "mm into a view": lambda a, b, c: torch.mm(a, b, out=c.new_empty(5, 6).t()),
    "addmm": lambda a, b, c: torch.addmm(c, a, b, beta=0.5, alpha=2),
    "addmm in place": lambda a, b, c: c.clone().addmm_(a, b),
    "bmm": lambda a, b, c: torch.bmm(a[None], b[None])[0],
    "bmm out": lambda a, b, c: torch.bmm(a[None], b[None], out=torch.empty_like(c[None]))[0],
    "baddbmm": lambda a, b, c: torch.baddbmm(c[None], a[None], b[None])[0],
    "baddbmm in place": lambda a, b, c: c[None].clone().baddbmm_(a[None], b[None])[0],
    "linear": lambda a, b, c: torch.nn.functional.linear(a[None], b.t().contiguous(), c[0])[0],
    "einsum": lambda a, b, c: torch.einsum("ij,jk->ik", a, b),
}


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS.keys())
def test_every_product_is_the_one_in_fp32_rounded_once(product: Callable[..., Tensor], in_fp32: None) -> None:
    got = product(A, B, C)
    assert got.dtype == torch.float16
    assert torch.equal(got, product(A.float(), B.float(), C.float()).half())


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_products_of_other_types_keep_their_bits(
    product: Callable[..., Tensor], dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    tensors = [x.to(dtype) for x in (A, B, C)]
    before = product(*tensors)
    request.getfixturevalue("in_fp32")
    assert torch.equal(product(*tensors), before)


def test_gradients_are_fp16_and_what_is_too_large_is_infinite(in_fp32: None) -> None:
    weight, x = torch.full((2, 4), 200.0).half().requires_grad_(), torch.full((3, 4), 100.0).half()
    y = torch.nn.functional.linear(x, weight)
    assert y.dtype == torch.float16 and y.isinf().all()  # 80 000: as on a GPU, so the loss scale falls
    torch.nn.functional.linear(x, weight).backward(torch.ones(3, 2).half())
    assert weight.grad is not None and weight.grad.dtype == torch.float16
    assert torch.equal(weight.grad, torch.full((2, 4), 300.0).half())


@pytest.mark.parametrize("mask", [None, drawn(8, 8), drawn(8, 8) > 0], ids=["causal", "added", "bool"])
def test_the_derivative_of_pytorchs_attention_is_the_one_in_fp32(mask: Tensor | None, in_fp32: None) -> None:
    def gradients(dtype: torch.dtype) -> list[Tensor]:
        tensors = [(drawn(1, 2, 8, 16) * scale).to(dtype).requires_grad_() for scale in (1, 2, 3)]
        added = mask.to(dtype) if mask is not None and mask.is_floating_point() else mask
        out = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=added, is_causal=mask is None)
        return list(torch.autograd.grad(out, tensors, torch.ones_like(out)))

    for got, exact in zip(gradients(torch.float16), gradients(torch.float32), strict=True):
        assert got.dtype == torch.float16
        torch.testing.assert_close(got.float(), exact, rtol=2e-2, atol=2e-2)


def test_factors_of_two_types_are_refused_as_before(in_fp32: None) -> None:
    with pytest.raises(RuntimeError, match="dtype"):
        A @ B.float()


def test_a_processor_with_such_products_keeps_torchs_own() -> None:
    asked = fp16_products.multiply_in_fp32.cache_info()
    assert "own instructions" in fp16_products.set_fp16_products(has=lambda: True)
    assert fp16_products.multiply_in_fp32.cache_info() == asked


def test_a_torch_that_cannot_be_told_says_that_it_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.library, "get_kernel")
    assert "very slow" in fp16_products.set_fp16_products(has=lambda: False)
