"""The gradients of attention in blocks, put together on the CPU. The oracle adds up blocks as wide as
the sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.ops.fused_qkv import empty_thirds
from megatron.ops.proof.subject import Call, Draw, Subject
from megatron.ops.ref import widened

# batch, heads, groups, seq, width, block
SHAPES = ((1, 1, 1, 1, 1, 64), (2, 3, 3, 9, 8, 4), (1, 6, 2, 130, 64, 64), (2, 2, 1, 40, 7, 16), (1, 4, 4, 96, 33, 32))


def oracle(query: Tensor, key: Tensor, value: Tensor, shape: tuple[int, ...], causal: bool) -> tuple[Tensor, ...]:
    batch, heads, groups, seq, width, block = shape
    starts = range(0, seq, block)
    ends = [min(start + block, seq) for start in starts]
    own = list(zip(starts, ends, strict=True))
    seen = [(0, end if causal else seq) for end in ends]

    def together(parts: Tensor, heads: int, rows: list[tuple[int, int]]) -> Tensor:
        pieces = parts.split([batch * heads * (end - start) * width for start, end in rows])
        total = widened(parts.new_zeros(batch, heads, seq, width))
        for (start, end), piece in zip(rows, pieces, strict=True):
            whole = torch.zeros_like(total)
            whole[:, :, start:end] = piece.view(batch, heads, end - start, width)
            total = total + whole
        return total.to(parts.dtype)

    return together(query, heads, own), together(key, groups, seen), together(value, groups, seen)


def kernel(ops: Any) -> Callable[..., tuple[Tensor, ...]]:
    def call(query: Tensor, key: Tensor, value: Tensor, shape: tuple[int, ...], causal: bool) -> tuple[Tensor, ...]:
        batch, heads, groups, seq, width, block = shape
        like = query.new_empty(batch, seq, heads, width)
        apart = (torch.empty_like(like), *(like.new_empty(batch, seq, groups, width) for _ in range(2)))
        grads = tuple(t.transpose(1, 2) for t in (empty_thirds(like) if heads == groups else apart))
        ops.block_gradients_(*grads, query, key, value, block, causal)
        return grads

    return call


def calls(draw: Draw) -> Iterator[Call]:
    for shape in SHAPES:
        batch, heads, groups, seq, width, block = shape
        for causal in (True, False):
            seen = [min(start + block, seq) if causal else seq for start in range(0, seq, block)]
            key, value = (draw(batch * groups * sum(seen) * width) for _ in range(2))
            yield Call(f"{shape} {causal}", (draw(batch * heads * seq * width), key, value, shape, causal), grads=())
    specials = [draw.with_specials(2 * rows * 8) for rows in (12, 24, 24)]
    yield Call("inf and nan", (*specials, (1, 2, 2, 12, 8, 4), True), grads=())


SUBJECTS = (Subject(name="block_gradients", source="", kernel=kernel, oracle=oracle, calls=calls),)
