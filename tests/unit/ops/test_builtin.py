"""Every faster implementation against the plain formula: results and all gradients, odd shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.ops import Kernels, attention, resolve

REF, AUTO = resolve("ref", "cpu"), resolve("auto", "cpu")
Operation = Callable[[Kernels, list[Tensor]], Tensor]

OPERATIONS: dict[str, tuple[Operation, list[tuple[int, ...]]]] = {
    "layer_norm": (lambda k, t: k.layer_norm(t[0], t[1], t[2], 1e-5), [(3, 5, 7), (7,), (7,)]),
    "layer_norm_no_bias": (lambda k, t: k.layer_norm(t[0], t[1], None, 1e-5), [(3, 5, 7), (7,)]),
    "rms_norm": (lambda k, t: k.rms_norm(t[0], t[1], 1e-6), [(3, 5, 7), (7,)]),
    "gelu_tanh": (lambda k, t: k.gelu(t[0], True), [(3, 5, 7)]),
    "gelu_erf": (lambda k, t: k.gelu(t[0], False), [(3, 5, 7)]),
    "swiglu": (lambda k, t: k.swiglu(t[0]), [(3, 5, 14)]),
    "squared_relu": (lambda k, t: k.squared_relu(t[0]), [(3, 5, 7)]),
    "rope": (lambda k, t: k.rope(t[0], t[1].detach(), t[2].detach()), [(2, 5, 3, 10), (1, 5, 1, 4), (1, 5, 1, 4)]),
    "attention": (
        lambda k, t: k.attention(*t, mask=None, causal=True, scale=0.3),
        [(2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 9, 8)],
    ),
    "attention_gqa": (
        lambda k, t: k.attention(*t, mask=None, causal=True, scale=0.3, layer_scaling=3),
        [(2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8)],
    ),
    "attention_masked_mqa": (
        lambda k, t: k.attention(*t, mask=torch.ones(9, 9).tril().triu(-3).bool(), causal=False, scale=0.3),
        [(2, 4, 9, 8), (2, 1, 9, 8), (2, 1, 9, 8)],
    ),
    "attention_mask_and_causal": (
        lambda k, t: k.attention(*t, mask=torch.ones(9, 9).triu(-3).bool(), causal=True, scale=0.3),
        [(2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 9, 8)],
    ),
    "attention_continued": (
        lambda k, t: k.attention(*t, mask=None, causal=True, scale=0.3),
        [(2, 4, 3, 8), (2, 4, 9, 8), (2, 4, 9, 8)],
    ),
    "cross_entropy": (lambda k, t: k.cross_entropy(t[0], torch.arange(5)), [(5, 11)]),
}


def run(operation: Operation, kernels: Kernels, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = operation(kernels, leaves)
    weights = torch.linspace(-1, 2, out.numel()).bfloat16().to(out.dtype).view(out.shape)  # the same in every dtype
    out.backward(weights)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("name", OPERATIONS)
def test_auto_equals_ref_in_fp64(name: str) -> None:
    operation, shapes = OPERATIONS[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    for fast, slow in zip(run(operation, AUTO, inputs), run(operation, REF, inputs), strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "cross_entropy"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_error_against_fp64(name: str, dtype: torch.dtype) -> None:
    """Relative Frobenius error within a few roundings of the dtype, for the outputs and every gradient."""
    operation, shapes = OPERATIONS[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    exact = run(operation, REF, [tensor.double() for tensor in inputs])
    limit = 1.5e-2 if dtype == torch.bfloat16 else 2e-3
    for kernels in (AUTO, REF):
        for got, want in zip(run(operation, kernels, inputs), exact, strict=True):
            assert got.dtype == dtype
            assert (got.double() - want).norm() <= limit * want.norm()


@pytest.mark.parametrize("name", [name for name in OPERATIONS if not name.startswith("squared")])
def test_gradients_of_ref_are_numerically_right(name: str) -> None:
    operation, shapes = OPERATIONS[name]
    torch.manual_seed(1)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    differentiable = inputs[:1] if name == "rope" else inputs

    def call(*tensors: Any) -> Tensor:
        return operation(REF, [*tensors, *inputs[len(tensors) :]])

    assert torch.autograd.gradcheck(call, differentiable)


def test_attention_dropout_keeps_the_expectation() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(512, 2, 16, 8) for _ in range(3))
    for kernels in (AUTO, REF):
        options = {"mask": None, "causal": True, "scale": 0.3}
        kept = kernels.attention(query, key, value, **options)
        dropped = kernels.attention(query, key, value, dropout_p=0.5, **options)
        assert not torch.equal(kept, dropped)
        slope = (kept * dropped).sum() / kept.square().sum()
        assert abs(slope - 1) < 0.05


def test_layer_scaling_widens_the_fp16_range() -> None:
    query = torch.full((1, 1, 4, 64), 60.0, dtype=torch.float16)  # scores of 115200 do not fit fp16
    value = torch.randn(1, 1, 4, 64).half()
    options = {"mask": None, "causal": True, "scale": 0.5}
    plain = attention.attention(query, query, value, **options)
    scaled = attention.attention(query, query, value, layer_scaling=8, **options)
    assert not plain.isfinite().all()
    assert scaled.isfinite().all()
