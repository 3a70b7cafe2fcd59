"""Half precision on a processor without such products: multiplied in fp32, rounded once, other dtypes untouched."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from megatron.ops import linear, packed
from megatron.utils import half_products
from megatron.utils.half_products import multiplied_in_fp32, set_half_products
from tests.helpers.runs import flags, train_here

HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture(params=HALVES, ids=str)
def half(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """A dtype that is multiplied in fp32 during the test."""
    dtype: torch.dtype = request.param
    tables = half_products._tables()
    before = tables.pop(dtype, None)  # a run of another test may have entered it
    assert "computed in fp32" in set_half_products(dtype, has=lambda: False) and multiplied_in_fp32(dtype)
    yield dtype
    tables.pop(dtype)._destroy()
    assert not multiplied_in_fp32(dtype)
    if before is not None:
        tables[dtype] = before


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


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


@pytest.mark.parametrize("side", [2048, 4, 7], ids=lambda side: f"tiles of {side}")
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS.keys())
def test_every_product_is_the_exact_one_rounded_once(
    product: Callable[..., Tensor], side: int, half: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle is fp64. Sums of 64 terms in fp32 have an error below a thousandth of a half's last bit."""
    monkeypatch.setattr(half_products, "_SIDE", side)
    factors = [x.to(half) for x in (A, B, C)]
    got, exact = product(*factors), product(*(x.double() for x in factors))
    assert got.dtype == half and got.shape == exact.shape
    rounded = exact.to(half).double()
    spacing = torch.finfo(half).eps * exact.abs().clamp(min=1e-2)
    assert bool(((got.double() - exact).abs() <= (rounded - exact).abs() + 1e-3 * spacing).all())


@pytest.mark.parametrize("side", [2048, 5, 4, 3])  # all matrices of the batch at a time, two, one, and less than one
def test_batches_of_matrices(side: int, half: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_products, "_SIDE", side)
    a, b, c = (drawn(3, *size).to(half) for size in ((3, 4), (4, 2), (3, 2)))
    exact = torch.baddbmm(c.double(), a.double(), b.double(), beta=0.5)
    torch.testing.assert_close(torch.baddbmm(c, a, b, beta=0.5), exact.to(half))
    torch.testing.assert_close(torch.bmm(a, b), torch.bmm(a.double(), b.double()).to(half))


@pytest.mark.parametrize("shape", [(0, 3, 2), (3, 0, 2), (3, 2, 0)], ids=str)
def test_empty_factors(shape: tuple[int, int, int], half: torch.dtype) -> None:
    m, k, n = shape
    a, b, c = torch.ones(m, k).to(half), torch.ones(k, n).to(half), torch.ones(m, n).to(half)
    for got, expected in ((a @ b, 0.0), (torch.addmm(c, a, b), 1.0), (torch.bmm(a[None], b[None])[0], 0.0)):
        assert torch.equal(got, torch.full((m, n), expected).to(half))


def test_what_beta_leaves_out_is_not_read(half: torch.dtype) -> None:
    nan = torch.full((6, 5), torch.nan).to(half)
    a, b = A.to(half), B.to(half)
    assert torch.equal(torch.addmm(nan, a, b, beta=0), a @ b)
    assert torch.equal(torch.baddbmm(nan[None], a[None], b[None], beta=0)[0], a @ b)


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS.keys())
def test_products_of_other_types_keep_their_bits(
    product: Callable[..., Tensor], half: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [dtype for dtype in (torch.float32, torch.float64, *HALVES) if dtype != half]
    with_table = [product(*(x.to(dtype) for x in (A, B, C))) for dtype in others]
    half_products._tables()[half]._destroy()
    without = [product(*(x.to(dtype) for x in (A, B, C))) for dtype in others]
    assert all(torch.equal(*pair) for pair in zip(with_table, without, strict=True))


def test_gradients_keep_the_type_and_fp16_overflows_to_inf(half: torch.dtype) -> None:
    weight, x = torch.full((2, 4), 200.0).to(half).requires_grad_(), torch.full((3, 4), 100.0).to(half)
    y = torch.nn.functional.linear(x, weight)
    assert y.dtype == half and bool(y.isinf().all()) == (half == torch.float16)  # 80 000: as on a GPU
    torch.nn.functional.linear(x, weight).backward(torch.ones(3, 2).to(half))
    assert weight.grad is not None and weight.grad.dtype == half
    assert torch.equal(weight.grad, torch.full((2, 4), 300.0).to(half))


@pytest.mark.parametrize("mask", [None, drawn(8, 8), drawn(8, 8) > 0], ids=["causal", "added", "bool"])
def test_the_derivative_of_pytorchs_attention_is_the_one_in_fp32(mask: Tensor | None, half: torch.dtype) -> None:
    def gradients(dtype: torch.dtype) -> list[Tensor]:
        tensors = [(drawn(1, 2, 8, 16).to(half) * scale).to(dtype).requires_grad_() for scale in (1, 2, 3)]
        added = mask.to(dtype) if mask is not None and mask.is_floating_point() else mask
        out = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=added, is_causal=mask is None)
        return list(torch.autograd.grad(out, tensors, torch.ones_like(out)))

    close = 2e-2 if half == torch.float16 else 2e-1
    for got, exact in zip(gradients(half), gradients(torch.float32), strict=True):
        assert got.dtype == half
        torch.testing.assert_close(got.float(), exact, rtol=close, atol=close)


def test_factors_that_do_not_fit_are_refused_as_before(half: torch.dtype) -> None:
    a, b = A.to(half), B.to(half)
    with pytest.raises(RuntimeError, match="dtype"):
        a @ b.float()
    with pytest.raises(RuntimeError, match=r"cannot be multiplied \(\(6, 64\) and \(63, 5\)\)"):
        a @ b[1:]
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.bmm(a[None], b[None, 1:])


def test_operations_of_onednn_alone_are_not_taken(half: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN would multiply bf16 without the processor's instructions, slowly."""
    monkeypatch.setattr(linear, "adds_bias", lambda: pytest.fail("oneDNN adds the bias"))
    monkeypatch.setattr(packed, "memory_is_kept", lambda: True)
    if half == torch.bfloat16:
        assert not packed.pays()
        linear.linear(A.to(half), B.t().to(half), C[0].to(half))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_processor_with_such_products_keeps_torchs_own(dtype: torch.dtype) -> None:
    before = multiplied_in_fp32(dtype)  # a run of another test may have changed it
    assert "own instructions" in set_half_products(dtype, has=lambda: True)
    assert multiplied_in_fp32(dtype) == before


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_torch_that_cannot_be_changed_says_that_it_is_slow(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.library, "get_kernel")
    assert "slow on this processor" in set_half_products(dtype, has=lambda: False)


@pytest.mark.parametrize("half", [torch.bfloat16], indirect=True)
def test_a_run_in_bf16_without_the_instructions_trains_the_same(
    half: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses agree within bf16 rounding, with fused linears, attention and head, and with the kernels selected here."""
    monkeypatch.setattr(half_products, "has_bf16_products", lambda: False)
    products: list[str] = []
    tile = half_products._tile
    monkeypatch.setattr(half_products, "_tile", lambda *args: products.append("tile") or tile(*args))
    argv = flags(train_iters=3, bf16=True)
    widened = train_here(argv)
    assert len(products) > 3 * 3 * 4  # iterations, passes, linear layers
    half_products._tables()[half]._destroy()
    for ours, theirs in zip(widened["records"], train_here(argv)["records"], strict=True):
        assert ours["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=5e-3)
