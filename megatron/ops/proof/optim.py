"""The optimizer's kernels: AdamW written out in fp64, and the plain sum of squares."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from megatron.ops.optim import join_fp32, split_fp32
from megatron.ops.proof.compare import Call, Draw, proof_of
from megatron.ops.proof.rounding import Near, constant, depth, near, root

BETAS, EPS = (0.9, 0.999), 1e-8
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OFF = ", off a pack: "


def adamw(
    weights: Tensor, m: Tensor, v: Tensor, grad: Tensor, ends: Tensor, rates: Tensor, control: Tensor, _: str
) -> Any:
    """Oracle of `kernel`: returns weights and moments, then ones: every element of the model's copy must be correct."""
    applied, factor, lr, decay, correction1, correction2_root = control
    if applied == 0:
        return weights, m, v, torch.ones_like(weights)
    lr_mult, wd_mult = rates.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)), dim=0).unbind(1)
    g, rate = grad.to(weights.dtype) * factor, lr * lr_mult
    m2, v2 = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g * g
    step = (rate / correction1) * (m2 / (v2.sqrt() / correction2_root + EPS))
    new = weights - (rate * (decay * wd_mult) * weights + step)
    return new, m2, v2, torch.ones_like(weights)


def kernel(ops: Any) -> Callable[..., Any]:
    def call(
        weights: Tensor, m: Tensor, v: Tensor, grad: Tensor, ends: Tensor, rates: Tensor, control: Tensor, kept: str
    ) -> Any:
        kept, _, off = kept.partition(OFF)

        def own(name: str, tensor: Tensor) -> Tensor:
            """Copies a tensor. The tensor named by `off` begins within a pack, so it is misaligned."""
            return tensor.new_empty(len(tensor) + 1)[1:].copy_(tensor) if name == off else tensor.clone()

        weights, m, v = own("weights", weights), own("m", m), own("v", v)
        rest = m, v, grad, ends, rates, control, *BETAS, EPS
        if kept == "remainder":
            high, low = (own(name, part) for name, part in zip(("high", "low"), split_fp32(weights)))
            ops.adamw_remainder_(high, low, *rest)
            return join_fp32(high, low), m, v, torch.ones_like(m)
        copy = own("copy", weights.to(HALVES[kept])) if kept in HALVES else weights.new_empty(0)
        ops.adamw_(weights, copy, *rest)
        right = copy == weights.to(copy.dtype) if kept in HALVES else torch.ones_like(weights)
        return weights, m, v, (right | weights.isnan() if kept in HALVES else right).float()

    return call


def calls(draw: Draw) -> Iterator[Call]:
    for kept in ("in place", "bf16", "fp16", "remainder"):
        for sizes in ([1], [7], [3, 1, 1000, 5], [4096, 1, 2999, 128]):
            yield Call(f"{kept}, {sizes}", (*_tensors(draw, sizes, draw(sum(sizes))), _control(), kept), ())
        yield Call(f"{kept}, left out", (*_tensors(draw, [70, 9], draw(79)), _control(applied=0.0), kept), ())
        yield Call(f"{kept}, inf and nan", (*_tensors(draw, [70, 9], _not_finite(draw, 79)), _control(), kept), ())
    odd = [tensor[1:] for tensor in _tensors(draw, [7001], draw(7001))[:4]]  # not aligned to a pack
    ends, rates = _segments([2000, 5000])
    yield Call("not aligned", (*odd, ends, rates, _control(), "in place"), ())
    for kept, off in (*product(["bf16"], ("weights", "m", "v", "copy")), *product(["remainder"], ("high", "low"))):
        call = (*_tensors(draw, [70, 9], draw(79)), _control(), f"{kept}{OFF}{off}")
        yield Call(f"{kept}, only {off} not aligned", call, ())


def _tensors(draw: Draw, sizes: list[int], grad: Tensor) -> tuple[Tensor, ...]:
    count = sum(sizes)
    moments = draw(count, dtype=torch.float32) * 0.1, draw(count, dtype=torch.float32).square() * 0.1
    return draw(count, spread=0.02, dtype=torch.float32), *moments, grad, *_segments(sizes)


def _not_finite(draw: Draw, count: int) -> Tensor:
    """Draws special values without the largest numbers, whose squares overflow in all dtypes except fp64."""
    grad = draw(count)
    grad[3:40:9] = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])
    return grad


def _segments(sizes: list[int]) -> tuple[Tensor, Tensor]:
    rates = [[1.0 + place % 2, float(place % 3 != 1)] for place in range(len(sizes))]
    return torch.tensor(sizes).cumsum(0), torch.tensor(rates)


def _control(applied: float = 1.0) -> Tensor:
    return torch.tensor([applied, 0.37, 1e-3, 0.1, 1 - BETAS[0] ** 3, (1 - BETAS[1] ** 3) ** 0.5])


def adamw_bounds(args: Sequence[Any], _: Sequence[Tensor]) -> tuple[list[Near], dict[int, Near]]:
    weights, m, v, grad, ends, rates, control = args[:7]
    applied, factor, lr, decay, correction1, correction2_root = (near(number) for number in control)
    if applied.value == 0:
        return [near(weights), near(m), near(v), near(torch.ones_like(weights))], {}
    lr_mult, wd_mult = rates.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)), dim=0).unbind(1)
    g, rate = near(grad) * factor, near(lr_mult) * lr
    m2 = near(m) * constant(BETAS[0]) + g * constant(1 - BETAS[0])
    v2 = near(v) * constant(BETAS[1]) + (g * g) * constant(1 - BETAS[1])
    size = root(v2) / correction2_root + constant(EPS)
    step = (rate / correction1) * (m2 / size)
    new = near(weights) - (rate * (near(wd_mult) * decay) * weights + step)
    return [new, m2, v2, near(torch.ones_like(weights))], {}


def square_sum_bounds(args: Sequence[Any], _: Sequence[Tensor]) -> tuple[list[Near], dict[int, Near]]:
    """Bounds of a sum in fp64, like the oracle's."""
    total = square_sum(args[0])
    return [Near(total, total * (2 * depth(args[0].numel()) * 2.0**-53))], {}


def square_sum(x: Tensor) -> Tensor:
    return x.double().square().sum()


def square_sum_calls(draw: Draw) -> Iterator[Call]:
    for count in (0, 1, 7, 1000, 50257):
        yield Call(f"{count}", (draw(count),), ())
    yield Call("not aligned", (draw(5001)[1:],), ())
    yield Call("wide range", (draw(3000, spread=30.0),), ())
    yield Call("inf and nan", (draw.with_specials(500),), ())
    if draw.dtype == torch.float32:
        yield Call("more than one part", (draw(140_001),), ())
        yield Call("squares beyond fp32", (draw(300, spread=1e30),), ())


PROOFS = (
    proof_of("adamw", calls, adamw_bounds, kernel=kernel, oracle=adamw),
    proof_of("grad_norm", square_sum_calls, square_sum_bounds, oracle=square_sum),
)
