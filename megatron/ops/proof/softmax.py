"""Scaled, masked softmax: the oracle is the plain formula. The oracle's gradient uses probabilities rounded to their
dtype, because the kernel saves only the rounded ones."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.ops.proof.compare import Call, Draw, proof_of
from megatron.ops.proof.rounding import Near, constant, near, shares
from megatron.ops.softmax import causal_mask, softmax
from megatron.utils.dtype import widened

SHAPES = ((1, 1, 1, 1), (2, 3, 5, 7), (1, 2, 33, 33), (2, 1, 3, 1000), (1, 1, 2, 4097), (3, 2, 16, 64))


class Oracle(Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
        out = softmax(scores, mask, scale, causal)
        ctx.save_for_backward(out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, upstream = (widened(tensor) for tensor in (*ctx.saved_tensors, grad))
        wide = ctx.scale * out * (upstream - (out * upstream).sum(-1, keepdim=True))
        return wide.to(grad.dtype), None, None, None


def oracle(scores: Tensor, mask: Tensor | None, scale: float, causal: bool = False) -> Tensor:
    return Oracle.apply(scores, mask, scale, causal)


def calls(draw: Draw) -> Iterator[Call]:
    yield Call("no rows", (draw(0, 2, 3, 4), None, 1.0))
    for shape in SHAPES:
        for causal in (False, True):
            yield Call(f"{shape} {causal}", (draw(*shape), None, 0.7, causal))
    yield from masked_calls(draw)
    yield Call("two dimensions", (draw(9, 9), None, 1.0, True))
    yield Call("five dimensions", (draw(2, 1, 2, 3, 8), draw.integers(2, 2, 1, 1, 3, 8) == 0, 1.0))
    yield Call("not contiguous", (draw(2, 3, 20, 6).transpose(2, 3), None, 2.0))
    yield Call(
        "wide range", (draw(1, 1, 6, 300, spread=90.0), None, 1.0), grads=()
    )  # a probability of 1 has no gradient
    yield Call("inf and nan", (draw.with_specials(1, 2, 9, 65), None, 0.5))
    nothing = torch.ones(4, 10, dtype=torch.bool)
    nothing[1] = False
    yield Call("a query that sees nothing", (draw(1, 2, 4, 10), nothing, 1.0), grads=())
    yield Call("more queries than keys", (draw(1, 1, 6, 4), None, 1.0, True), grads=())


def masked_calls(draw: Draw) -> Iterator[Call]:
    visible = torch.eye(37, dtype=torch.bool)  # every query sees something
    for shape in ((37, 37), (1, 1, 37, 37), (2, 1, 37, 37), (1, 3, 37, 37), (2, 3, 37, 37)):
        mask = (draw.integers(3, *shape) == 0) | visible
        yield Call(f"mask {shape}", (draw(2, 3, 37, 37), mask, 1.3))
        yield Call(f"mask {shape}, causal", (draw(2, 3, 37, 37), mask, 1.3, True))
    padding = torch.arange(37) < torch.tensor([[20], [37]])
    yield Call("padding", (draw(2, 3, 5, 37), padding[:, None, None, :], 1.0))
    yield Call("mask by columns", (draw(2, 3, 37, 37), ((draw.integers(3, 37, 37) == 0) | visible).t(), 1.0))
    yield Call("one value a query", (draw(2, 1, 4, 6), torch.ones(4, 1, dtype=torch.bool), 1.0))


def probability_bounds(args: Sequence[Any], upstreams: Sequence[Tensor]) -> tuple[list[Near], dict[int, Near]]:
    scores, mask, scale = args[:3]
    hidden = torch.zeros(scores.shape, dtype=torch.bool) if mask is None else ~mask.expand(scores.shape)
    if len(args) > 3 and args[3]:
        hidden = hidden | ~causal_mask(scores.shape[-2], scores.shape[-1], scores.device)
    scaled = near(scores) * constant(scale)
    seen = Near(scaled.value.masked_fill(hidden, -torch.inf), scaled.error.masked_fill(hidden, 0.0))
    kept, total, _ = shares(seen, scores.dtype.itemsize == 2)
    out = kept / total
    stored, grad = out.stored(scores.dtype), near(upstreams[0])
    return [out], {0: (grad - (grad * stored).sum(-1)) * (stored * constant(scale))}


PROOFS = (proof_of("softmax", calls, probability_bounds, oracle=oracle),)
