"""Products of a few rows beyond the common comparison: independent rows, where it is selected, planted bugs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, ones

from megatron.ops import resolve
from megatron.ops.packed import PackedWeight
from megatron.ops.proof import Call, Draw
from megatron.ops.proof.compare import proof_of
from megatron.ops.proof.rounding import Near, near
from tests.helpers.declared import Refused
from tests.helpers.kernels import backend, kernel
from tests.helpers.planted import Mistake

REFUSED: Refused = {
    "few_rows": [
        (
            (ones(2, 3), ones(4, 5), None),
            "x float32 (2, 3) and a weight float32 (4, 5): the kernel needs [..., in] and [out, in]",
        ),
        (
            (ones(2, 3), ones(4, 3), ones(3)),
            "a bias float32 (3,) for a weight float32 (4, 3): the kernel needs one number per row",
        ),
        (
            (ones(2, 3), ones(4, 3).bfloat16(), None),
            "x float32 (2, 3) and a weight bfloat16 (4, 3): the kernel needs one dtype",
        ),
        (
            (ones(2, 3), ones(4, 3), ones(4).bfloat16()),
            "x float32 (2, 3) and a bias bfloat16 (4,): the kernel needs one dtype",
        ),
        (
            (*[ones(3, 3, dtype=torch.float64)] * 2, None),
            "float64 (3, 3): the kernel needs float32, bfloat16 or float16",
        ),
    ]
}
SHAPES = ((1, 1, 1), (1, 64, 3), (2, 65, 5), (3, 33, 70), (4, 128, 9), (5, 768, 130), (9, 100, 33), (1, 3072, 40))


def proof_calls(draw: Draw) -> Iterator[Call]:
    for rows, inputs, outputs in SHAPES:
        x, weight = draw(rows, inputs), draw(outputs, inputs)
        yield Call(f"{rows} x {inputs} x {outputs}", (x, weight, None), grads=())
        yield Call(f"{rows} x {inputs} x {outputs}, bias", (x, weight, draw(outputs, spread=30.0)), grads=())
    yield Call("more dimensions", (draw(2, 3, 40), draw(7, 40), draw(7)), grads=())
    yield Call("numbers not side by side", (draw(40, 2).t(), draw(40, 7).t(), None), grads=())
    yield Call("no row", (draw(0, 40), draw(7, 40), draw(7)), grads=())
    for name, special in (("inf", torch.inf), ("nan", torch.nan)):
        x = draw(5, 70)
        x[3, 68] = special
        yield Call(f"{name} in a row", (x, draw(9, 70), None), grads=())


def proof_bounds(args: Sequence[Any], _: Sequence[Tensor]) -> tuple[list[Near], dict[int, Near]]:
    x, weight, bias = args
    product = (near(x)[..., None, :] * weight).sum(-1)[..., 0]
    return [product if bias is None else product + bias], {}


CPU_PROOFS = {"few_rows": proof_of("few_rows", proof_calls, proof_bounds)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_those_beside_it(dtype: torch.dtype) -> None:
    """Reading several tokens of a text at once must give the same bits as reading one after another."""
    product, draw = kernel("few_rows", backend("cpu").ops), Draw(dtype, torch.Generator().manual_seed(1))
    x, weight, bias = draw(11, 300), draw(50, 300), draw(50)
    together = product(x, weight, bias)
    assert all(torch.equal(product(x[row : row + 1], weight, bias)[0], together[row]) for row in range(11))


def test_weights_of_steps_take_it_for_one_row_alone() -> None:
    backend("cpu")
    kernels, asked = resolve("auto", "cpu"), []
    assert kernels.backend("few_rows") == "native" and resolve("auto", "cuda").backend("few_rows") == "ref"

    def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        asked.append(tuple(x.shape))
        return kernels.few_rows(x, weight, bias)

    weight, bias = torch.randn(33, 20), torch.randn(33)
    products = [PackedWeight(weight, few_rows, copied=copied) for copied in (True, False)]
    for shape in ((1, 20), (1, 1, 20), (2, 20), (2, 4, 20)):
        x = torch.randn(shape)
        for product in products:
            torch.testing.assert_close(product(x, bias), torch.nn.functional.linear(x, weight, bias))
    assert asked == [(1, 20), (1, 20), (1, 1, 20), (1, 1, 20)]


CPU = "few_rows/cpu.cpp"
MISTAKES = {
    "the end of a row": (CPU, "for_lanes(at, a.in,", "for_lanes(a.in, a.in,"),
    "every other piece": (CPU, "sum_of(even[row] + odd[row])", "sum_of(even[row])"),
    "rows beyond the first four": (CPU, "x + row * a.in, rows, sums", "x, rows, sums"),
    "no bias": (CPU, "store<T>(sums[i] + bias)", "store<T>(sums[i])"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_planted_bugs_are_seen(tmp_path: Path, name: str) -> None:
    Mistake(*MISTAKES[name], "few_rows").must_be_seen(tmp_path)
