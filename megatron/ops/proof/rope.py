"""Rotary embedding: the oracle is the plain formula in fp64."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.ops.proof.compare import Call, Draw, proof_of
from megatron.ops.proof.rounding import Near, concatenated, near


def angles(draw: Draw, batch: int, seq: int, half: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    angle = draw(batch, seq, 1, half, spread=3.0, dtype=torch.float32)
    return angle.cos().to(dtype or draw.dtype), angle.sin().to(dtype or draw.dtype)


def calls(draw: Draw) -> Iterator[Call]:
    for batch, seq, heads, width, half in (
        (2, 5, 3, 10, 4),
        (1, 3, 2, 64, 32),
        (2, 4, 12, 64, 16),
        (3, 2, 1, 7, 1),
        (1, 1, 1, 2, 1),
        (2, 0, 3, 8, 4),
        (2, 3, 2, 24, 0),
        (2, 3, 2, 16, 2),  # halves that begin within a pack
    ):
        yield Call(
            f"{batch}x{seq}x{heads}x{width}, {2 * half} turned",
            (draw(batch, seq, heads, width), *angles(draw, 1, seq, half)),
            grads=(0,),
        )
    yield Call("angles of every batch", (draw(3, 4, 2, 16), *angles(draw, 3, 4, 8)), grads=(0,))
    yield Call("angles in fp32", (draw(3, 4, 2, 16), *angles(draw, 1, 4, 8, torch.float32)), grads=(0,))
    fused = draw(2, 5, 4, 6, 16)  # [batch, seq, groups, per_group + 2, head_dim]
    yield Call("key of a fused projection", (fused[:, :, :, 4], *angles(draw, 1, 5, 8)), grads=(0,))
    yield Call("heads before positions", (draw(2, 3, 5, 16).transpose(1, 2), *angles(draw, 1, 5, 8)), grads=(0,))
    yield Call("off a pack", (draw(2, 5, 3, 17)[..., 1:], *angles(draw, 1, 5, 8)), grads=(0,))
    for name, strides in (("batches", (97, 32, 16, 1)), ("positions", (328, 41, 16, 1)), ("heads", (160, 40, 17, 1))):
        apart = draw(1000).as_strided((2, 3, 2, 16), strides)
        yield Call(f"only {name} off a pack", (apart, *angles(draw, 1, 3, 8)), grads=(0,))
    yield Call("channels apart", (draw(2, 5, 16, 3).transpose(2, 3), *angles(draw, 1, 5, 8)), grads=(0,))
    yield Call("inf and nan", (draw.with_specials(2, 5, 3, 26), *angles(draw, 1, 5, 8)), grads=(0,))


def turned_bounds(args: Sequence[Any], upstreams: Sequence[Tensor]) -> tuple[list[Near], dict[int, Near]]:
    x, cos, sin = args
    return [_turned(x, cos, sin)], {0: _turned(upstreams[0], cos, -sin)}


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Near:
    half = cos.shape[-1]
    first, second = near(x[..., :half]), near(x[..., half : 2 * half])
    return concatenated(first * cos - second * sin, second * cos + first * sin, near(x[..., 2 * half :]))


PROOFS = (proof_of("rope", calls, turned_bounds),)
