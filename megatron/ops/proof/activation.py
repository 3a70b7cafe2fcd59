"""Activations: the oracles are the plain formulas in fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron.ops.proof.compare import Call, Draw, proof_of

SHAPES = ((0, 4), (1, 2), (3, 14), (5, 16), (2, 1000), (2, 1002), (7, 2048))


def inputs(draw: Draw) -> Iterator[Call]:
    for rows, width in SHAPES:
        yield Call(f"{rows}x{width}", (draw(rows, width),))
    yield Call("3 dimensions", (draw(2, 3, 96),))
    yield Call("not contiguous", (draw(40, 6).t(),))
    yield Call("wide range", (draw(4, 512, spread=30.0),))
    yield Call("inf and nan", (draw.with_specials(6, 64),))


def with_bias(draw: Draw) -> Iterator[Call]:
    for rows, width in (*SHAPES, (1, 1), (9, 7), (70, 24), (530, 8)):  # the last: more parts than a block adds at once
        yield Call(f"{rows}x{width}", (draw(rows, width), draw(width)))
    yield Call("3 dimensions", (draw(2, 3, 96), draw(96)))
    yield Call("not contiguous", (draw(40, 6).t(), draw(80)[::2]))
    yield Call("bias in fp32", (draw(40, 24), draw(24, dtype=torch.float32)))
    yield Call("inf and nan", (draw.with_specials(6, 64), draw(64)))


def both_forms(calls: Iterator[Call]) -> Iterator[Call]:
    """Both forms of GELU: by tanh and by erf."""
    for call in calls:
        for tanh in (True, False):
            yield Call(f"{call.name}, {'tanh' if tanh else 'erf'}", (*call.args, tanh))


def many_rows(draw: Draw, arguments: Callable[[int], tuple[Any, ...]]) -> Iterator[Call]:
    """More than a grid has; slow in the emulator, and the same for every dtype and function: a gated one and one with a
    bias are enough."""
    if draw.dtype == torch.float32:
        yield Call("many rows", arguments(66_000), grads=(0,))  # that of a bias is the sum of parts


def gated(draw: Draw) -> Iterator[Call]:
    yield from inputs(draw)
    yield from many_rows(draw, lambda rows: (draw(rows, 2),))


def biased(draw: Draw) -> Iterator[Call]:
    yield from both_forms(with_bias(draw))
    yield from many_rows(draw, lambda rows: (draw(rows, 1), draw(1), True))


PROOFS = (
    proof_of("swiglu", gated),
    proof_of("geglu", lambda draw: both_forms(inputs(draw))),
    proof_of("gelu", lambda draw: both_forms(inputs(draw))),
    proof_of("bias_gelu", biased),
    proof_of("squared_relu", inputs),
)
