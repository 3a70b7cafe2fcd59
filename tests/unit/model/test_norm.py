"""The norm of a sum, compared with the sum and its norm written out in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.model.norm import Norm
from megatron.ops import Kernels, resolve
from tests.unit.model.helpers import config

WIDTH = 32
SORTS = pytest.mark.parametrize("sort", ["LayerNorm", "RMSNorm"])
TYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
KERNELS = pytest.mark.parametrize("kernels", ["auto", "ref"])


def make(kernels: Kernels, dtype: torch.dtype, sort: str, one_plus: bool = False) -> Norm:
    norm = Norm(WIDTH, config(hidden_size=WIDTH, normalization=sort, apply_layernorm_1p=one_plus), kernels)
    torch.manual_seed(1)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter, 0.0 if one_plus else 1.0, 0.5)
    return norm.to(dtype)


def written_out(total: Tensor, norm: Norm) -> Tensor:
    weight = norm.weight.detach().double() + float(norm.one_plus)
    centred = total if norm.is_rms else total - total.mean(-1, keepdim=True)
    normed = centred * (centred.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * weight
    return normed if norm.bias is None else normed + norm.bias.detach().double()


def values_and_gradients(outputs: tuple[Tensor, Tensor], inputs: list[Tensor]) -> list[Tensor]:
    scales = (torch.linspace(-1, 1, WIDTH, dtype=output.dtype) * scale for scale, output in zip((1, 3), outputs))
    loss = sum((output * scale).sum() for output, scale in zip(outputs, scales))
    assert isinstance(loss, Tensor)
    return [*outputs, *torch.autograd.grad(loss, inputs)]


@SORTS
@TYPES
@KERNELS
@pytest.mark.parametrize("one_plus", [False, True])
@pytest.mark.parametrize("wide_residual", [False, True])
def test_norm_of_a_sum(sort: str, dtype: torch.dtype, kernels: str, one_plus: bool, wide_residual: bool) -> None:
    norm = make(resolve(kernels, "cpu"), dtype, sort, one_plus)
    torch.manual_seed(0)
    residual_type = torch.float32 if wide_residual and dtype == torch.bfloat16 else dtype
    inputs = [torch.randn(2, 5, WIDTH).to(t).requires_grad_() for t in (dtype, residual_type)]
    got = values_and_gradients(norm.of_sum(*inputs), inputs)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    total = exact[0] + exact[1]
    expected = values_and_gradients((written_out(total, norm), total), exact)
    assert [x.dtype for x in got] == [dtype, residual_type, dtype, residual_type]
    limit = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for mine, right in zip(got, expected, strict=True):
        assert (mine.double() - right).norm() <= limit * right.norm()


@SORTS
def test_norm_of_a_sum_asks_the_kernels_for_both(sort: str) -> None:
    asked: list[str] = []

    class Recording:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(resolve("auto", "cpu"), name)

    norm = make(Recording(), torch.float32, sort)  # type: ignore[arg-type]
    norm.of_sum(torch.ones(1, WIDTH), torch.ones(1, WIDTH))
    assert asked == ["add_layer_norm" if sort == "LayerNorm" else "add_rms_norm"]


@SORTS
def test_a_hook_sees_the_norm_of_a_sum(sort: str) -> None:
    norm, seen = make(resolve("ref", "cpu"), torch.float32, sort), []
    x, residual = torch.randn(2, WIDTH), torch.randn(2, WIDTH)
    unseen = norm.of_sum(x, residual)
    norm.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    normed, total = norm.of_sum(x, residual)
    ((given, out),) = seen
    assert torch.equal(given, total) and torch.equal(out, normed)
    assert all(torch.equal(one, other) for one, other in zip((normed, total), unseen, strict=True))
