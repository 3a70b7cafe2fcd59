"""How the CPU's attention is verified: the oracle is the plain formula. Kernels take [batch, heads, seq, d] in any
layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.ops import attention as attention_op
from megatron.ops.proof import Call, Draw, Proof
from megatron.ops.registry import OPERATIONS

# batch, heads, groups, queries, keys, width
SHAPES = (
    (1, 1, 1, 1, 1, 1),
    (2, 2, 1, 5, 5, 7),
    (1, 4, 2, 64, 64, 80),
    (2, 3, 3, 65, 65, 33),
    (1, 6, 2, 130, 130, 64),
    (1, 2, 2, 20, 150, 16),
    (2, 1, 1, 300, 300, 128),
    (1, 2, 1, 17, 90, 96),
)
LIMITS = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
AS_NEAR_AS_REF = 2.0  # the mean gradient of a row is taken from the rounded output, as flash attention does everywhere


def oracle(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    return attention_op.attention(query, key, value, mask=mask, causal=causal, scale=0.3)


def kernel(ops: Any) -> Callable[..., Tensor]:
    native = OPERATIONS["attention"].native
    assert native is not None
    attention = native.bound(ops)

    def call(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        return attention(query, key, value, mask=mask, causal=causal, scale=0.3)

    return call


def calls(draw: Draw) -> Iterator[Call]:
    for shape in SHAPES:
        batch, heads, groups, queries, keys, width = shape
        three = draw(batch, heads, queries, width), draw(batch, groups, keys, width), draw(batch, groups, keys, width)
        yield Call(f"{shape} causal", (*three, None, True))
        yield Call(f"{shape} full", (*three, None, False))
        for sizes in ((1, 1), (batch, 1), (1, heads), (batch, heads)):
            mask = (draw.integers(2, *sizes, queries, keys) == 0) | (torch.arange(keys) == 0)
            yield Call(f"{shape}, mask of {sizes}", (*three, mask, sizes[0] == 1))
    yield from other_layouts(draw)
    yield Call("no batch", (draw(0, 2, 5, 8), draw(0, 2, 5, 8), draw(0, 2, 5, 8), None, True))
    large = draw(1, 1, 70, 32, spread=4.0), draw(1, 1, 70, 32, spread=4.0), draw(1, 1, 70, 32)
    yield Call("one key has all the weight", (*large, None, True), grads=())
    # Where a score were rounded in one pass and not in the other, weights would be far from right.
    for power in (6, 9):
        one = torch.zeros(1, 1, 40, 32, dtype=draw.dtype)
        one[..., 0] = 10.0 ** (power / 2) * torch.linspace(1.0, 1.7, 40)
        yield Call(f"scores of 1e{power}", (one, one, draw(1, 1, 40, 32), None, True), grads=(2,))


def other_layouts(draw: Draw) -> Iterator[Call]:
    fused = draw(2, 70, 3, 3, 16)
    yield Call("thirds", (*(third.transpose(1, 2) for third in fused.unbind(3)), None, True))
    across = draw(2, 3, 16, 40).transpose(2, 3)
    yield Call("numbers not side by side", (across, across, across, None, True))
    apart = torch.arange(90).div(30, rounding_mode="floor")
    documents = (apart[:, None] == apart)[None, None]
    three = draw(2, 2, 90, 24), draw(2, 2, 90, 24), draw(2, 2, 90, 24)
    yield Call("documents", (*three, documents, True))
    yield Call("documents, mask by columns", (*three, documents.transpose(2, 3), True))
    yield Call("a value of the mask for all queries", (*three, (torch.arange(90) < 71)[None], False))
    for name, special in (("inf", torch.inf), ("nan", torch.nan)):
        query = three[0].clone()
        query[:, :, 3::13, 5] = special
        yield Call(f"{name} in some queries", (query, *three[1:], None, True), grads=())
    hidden = torch.ones(90, 90, dtype=torch.bool)
    hidden[40] = False
    yield Call("a query that sees nothing", (*three, hidden, True), grads=())


CPU_PROOFS = {
    "attention": Proof(
        name="attention",
        room="attention",
        kernel=kernel,
        oracle=oracle,
        calls=calls,
        limits=LIMITS,
        as_near_as_ref=AS_NEAR_AS_REF,
    )
}
