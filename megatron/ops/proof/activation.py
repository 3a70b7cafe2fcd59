"""Activations: the oracles are the plain formulas in fp64."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.ops.proof.compare import Bounds, Call, Draw, proof_of
from megatron.ops.proof.rounding import Near, concatenated, constant, logistic, near, normal

SHAPES = ((0, 4), (1, 2), (3, 14), (5, 16), (2, 1000), (2, 1002), (7, 2048))


def inputs(draw: Draw) -> Iterator[Call]:
    for rows, width in SHAPES:
        yield Call(f"{rows}x{width}", (draw(rows, width),))
    yield Call("3 dimensions", (draw(2, 3, 96),))
    yield Call("not contiguous", (draw(40, 6).t(),))
    yield Call("wide range", (draw(4, 512, spread=30.0),))
    yield Call("inf and nan", (draw.with_specials(6, 64),))


def both_forms(calls: Iterator[Call]) -> Iterator[Call]:
    """Yields every call for both forms of GELU, tanh and erf."""
    for call in calls:
        for tanh in (True, False):
            yield Call(f"{call.name}, {'tanh' if tanh else 'erf'}", (*call.args, tanh))


def gated(draw: Draw) -> Iterator[Call]:
    yield from inputs(draw)
    if draw.dtype == torch.float32:  # slow in the emulator, and equal for every dtype and gated function
        yield Call("many rows", (draw(66_000, 2),))  # more than a grid's largest dimension


# ---------------------------------------------------------------- bounds: the kernels' formulas


def _silu(x: Near, short: bool) -> tuple[Near, Near]:
    """Returns value and derivative."""
    gate, complement = logistic(x, short)
    value = x * gate
    return value, value * complement + gate


def _gelu(x: Near, short: bool, tanh: bool) -> tuple[Near, Near]:
    if not tanh:
        below, density = normal(x, short)
        return x * below, below + x * density
    twice = 2 * math.sqrt(2 / math.pi)
    bounded = x.map(lambda value: value.clamp(-100, 100))
    square = bounded * bounded
    gate, complement = logistic(bounded * (square * constant(twice * 0.044715) + constant(twice)), short)
    value, inner = x * gate, square * constant(3 * twice * 0.044715) + constant(twice)
    return value, value * (inner * complement) + gate


def _squared_relu(x: Near, short: bool) -> tuple[Near, Near]:
    kept = x.map(torch.relu)
    return kept * kept, kept * 2.0


def _bounds(graph: Callable[..., tuple[Near, Near]]) -> Bounds:
    def bounds(args: Sequence[Any], upstreams: Sequence[Tensor]) -> tuple[list[Near], dict[int, Near]]:
        x, *options = args
        value, slope = graph(near(x), x.dtype.itemsize == 2, *options)
        return [value], {0: near(upstreams[0]) * slope}

    return bounds


def _gated_bounds(graph: Callable[..., tuple[Near, Near]]) -> Bounds:
    def bounds(args: Sequence[Any], upstreams: Sequence[Tensor]) -> tuple[list[Near], dict[int, Near]]:
        x, *options = args
        gate, up = (near(half) for half in x.chunk(2, dim=-1))
        value, slope = graph(gate, x.dtype.itemsize == 2, *options)
        of_gate, of_up = near(upstreams[0]) * up * slope, near(upstreams[0]) * value
        return [value * up], {0: concatenated(of_gate, of_up)}

    return bounds


PROOFS = (
    proof_of("swiglu", gated, _gated_bounds(_silu)),
    proof_of("geglu", lambda draw: both_forms(inputs(draw)), _gated_bounds(_gelu)),
    proof_of("gelu", lambda draw: both_forms(inputs(draw)), _bounds(_gelu)),
    proof_of("squared_relu", inputs, _bounds(_squared_relu)),
)
