"""Products with a prepacked weight: torch's sums, and only where they are faster."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.ops import packed, resolve
from megatron.ops.linear_cross_entropy import VocabularyPart, Workspace, fused_linear_cross_entropy
from megatron.ops.operation import Target
from megatron.utils import cpu


def half(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("rows", [1, 95, 96, 97, 1000, 50257 // 16])
@pytest.mark.parametrize("columns", [1, 33, 384])
def test_transposed(rows: int, columns: int) -> None:
    weight = half(rows, columns)
    result = packed.transposed(weight)
    assert result.is_contiguous() and torch.equal(result, weight.t())


@pytest.mark.skipif(not packed.packs(), reason="this processor or this torch has no bf16 products through oneDNN")
@pytest.mark.parametrize("rows, inputs, outputs", [(1, 1, 1), (7, 33, 5), (64, 384, 1152), (2049, 40, 1003)])
def test_products_err_no_more_than_torchs_own(rows: int, inputs: int, outputs: int) -> None:
    x, grad, weight = half(rows, inputs), half(rows, outputs, seed=1), half(outputs, inputs, seed=2)
    cases = (
        (packed.product(x, packed.laid_out(weight, rows)), x, weight.t()),
        (packed.times(grad, weight), grad, weight),
    )
    for got, left, right in cases:
        exact = left.double() @ right.double()
        assert got.dtype == torch.bfloat16 and got.shape == exact.shape
        assert (got.double() - exact).norm() <= 1.1 * ((left @ right).double() - exact).norm() + 1e-30


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("packs", [True, False])
def test_only_where_it_pays(kept: bool, packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requires that freed memory is kept and that the products are right; the table of kernels has the reason."""
    monkeypatch.setattr(packed, "packs", lambda: packs)
    monkeypatch.setattr(packed, "memory_is_kept", lambda: kept)
    assert packed.selected() is (packed.times_where_it_pays if kept and packs else torch.matmul)
    for kernels in ("auto", "auto,-cross_entropy"):
        reasons = {choice.op: choice.reason for choice in resolve(kernels, "cpu").choices}
        assert ("weight packed by oneDNN" in reasons["linear_cross_entropy"]) == (kept and packs)
        assert ("freed memory is not kept" in reasons["linear_cross_entropy"]) == (not kept)
    assert packed.note(Target("cuda")) == ""


def test_only_products_that_are_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors: without bf16 instructions a product of this size takes a minute."""
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(packed, "times", lambda x, weight: asked.append(tuple(x.shape)) or x @ weight)
    on_meta = torch.zeros(2048, 2048, dtype=torch.bfloat16, device="meta")
    packed.times_where_it_pays(on_meta, on_meta)
    with FakeTensorMode():
        x = weight = torch.zeros(2048, 2048, dtype=torch.bfloat16)
        packed.times_where_it_pays(x[1:], weight)
        packed.times_where_it_pays(x[:, 1:], weight[1:])
        packed.times_where_it_pays(x.float(), weight.float())
        assert asked == []
        packed.times_where_it_pays(x, weight)
    assert asked == [(2048, 2048)]


def test_operations_that_multiply_wrongly_or_are_missing_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = SimpleNamespace(_reorder_linear_weight=lambda w, _: w, _linear_pointwise=lambda x, w, *_: x @ (2 * w.t()))
    for found in (wrong, SimpleNamespace()):
        monkeypatch.setattr(torch.ops, "mkldnn", found)
        assert not packed.packs.__wrapped__()


@pytest.mark.skipif(not packed.packs(), reason="this processor or this torch has no bf16 products through oneDNN")
@pytest.mark.parametrize("vocab", [997, 1003])
def test_the_head_is_the_same_function(vocab: int) -> None:
    """Loss and gradients are as near to fp64 as with torch's products; padding rows get no gradient."""
    hidden, weight, labels = half(70, 48), half(1003, 48, seed=1), torch.arange(70) % vocab

    def run(dtype: torch.dtype, product: packed.Product = torch.matmul) -> list[torch.Tensor]:
        x, w = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        losses = fused_linear_cross_entropy(x, w, labels, vocab, Workspace(), product=product)
        return [t.double() for t in (losses.detach(), *torch.autograd.grad(losses.mean(), (x, w)))]

    exact, composed = run(torch.float64), run(torch.bfloat16)
    asked: list[tuple[int, ...]] = []

    def always(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        asked.append(tuple(x.shape))
        return packed.times(x, weight)

    for got, other, right in zip(run(torch.bfloat16, always), composed, exact, strict=True):
        assert (got - right).norm() <= 1.1 * (other - right).norm()
    assert asked == [(70, vocab)]


KEPT = """
import sys
from megatron.utils.cpu import memory_is_kept, set_allocator
print(set_allocator(sys.argv[1]), file=sys.stderr)
print(memory_is_kept())
"""


@pytest.mark.parametrize("choice, kept", [("keep", "True"), ("system", "False")])
def test_whether_memory_is_kept(choice: str, kept: str) -> None:
    """Runs in a new process, because the setting is process-wide."""
    command = [sys.executable, "-c", KEPT, choice]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == kept


def test_the_heap_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later forward passes do not look again, although the native operation and a split vocabulary ask each time."""
    reads: list[str] = []

    class Maps:
        def read_text(self) -> str:
            reads.append("maps")
            return ""

    monkeypatch.setattr(cpu, "_MAPS", Maps())
    cpu.memory_is_kept.cache_clear()
    try:
        hidden, weight, labels = half(8, 16).requires_grad_(), half(32, 16, seed=1), torch.arange(8)
        for kernels in (resolve("auto", "cpu"), resolve("ref", "cpu")):
            for part in (None, VocabularyPart(0, lambda tensor, kind: None)):
                kernels.linear_cross_entropy(hidden, weight, labels, 32, None, part).sum().backward()
        assert len(reads) == 1
    finally:
        cpu.memory_is_kept.cache_clear()
