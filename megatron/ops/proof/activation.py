"""SwiGLU: the oracle is the plain formula in fp64."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron.ops import ref
from megatron.ops.native import OPERATIONS
from megatron.ops.proof.subject import Call, Draw, Subject


def calls(draw: Draw) -> Iterator[Call]:
    for rows, width in ((0, 4), (1, 2), (3, 14), (5, 16), (2, 1000), (7, 2048)):
        yield Call(f"{rows}x{width}", (draw(rows, width),))
    if draw.dtype == torch.float32:  # more rows than a grid has; slow in the emulator, and the same for every dtype
        yield Call("many rows", (draw(66_000, 2),))
    yield Call("3 dimensions", (draw(2, 3, 96),))
    yield Call("not contiguous", (draw(40, 6).t(),))
    yield Call("wide range", (draw(4, 512, spread=30.0),))
    yield Call("inf and nan", (draw.with_specials(6, 64),))


SUBJECTS = (
    Subject(name="swiglu", source="activation", kernel=OPERATIONS["swiglu"].make, oracle=ref.swiglu, calls=calls),
)
