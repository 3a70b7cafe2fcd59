"""Norms: the oracles are the plain formulas in fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.ops.proof.compare import Call, Draw, proof_of

EPS = 1e-5
LIMITS = {torch.float32: 1e-5}
# Widths beside every limit of the CUDA kernels: one number, no packs, a warp's columns, a block's, more than a block's;
# and odd ones as wide, which are read number by number.
SHAPES = ((0, 8), (1, 3), (5, 7), (70, 64), (3, 1000), (3, 1001), (9, 1024), (4, 1032), (2, 8200), (1, 8203))


def drawn(draw: Draw, rows: tuple[int, ...], width: int, *, summed: bool, bias: bool, gain: torch.dtype) -> list[Any]:
    x = draw(*rows, width, spread=2.0) + 0.5
    residual = [draw(*rows, width)] if summed else []
    parameters = [(1 + draw(width, spread=0.3, dtype=torch.float32)).to(gain)]
    return [x, *residual, *parameters, *([draw(width, dtype=gain)] if bias else [])]


def calls(*, centred: bool, summed: bool) -> Callable[[Draw], Iterator[Call]]:
    def arguments(tensors: list[Tensor]) -> tuple[Any, ...]:
        unbiased = centred and len(tensors) == (3 if summed else 2)
        return *tensors, *([None] if unbiased else []), EPS

    def generate(draw: Draw) -> Iterator[Call]:
        def call(name: str, rows: tuple[int, ...], width: int, bias: bool = centred, gain: Any = draw.dtype) -> Call:
            return Call(name, arguments(drawn(draw, rows, width, summed=summed, bias=bias, gain=gain)))

        for rows, width in SHAPES:
            yield call(f"{rows}x{width}", (rows,), width)
        yield call("4 dimensions", (2, 3, 5), 16)
        yield call("gain in fp32", (40,), 24, gain=torch.float32)
        yield call("gain in bf16", (40,), 24, gain=torch.bfloat16 if draw.dtype == torch.float32 else draw.dtype)
        if centred:
            yield call("no bias", (40,), 24, bias=False)
        turned = drawn(draw, (24,), 40, summed=summed, bias=centred, gain=draw.dtype)
        wide = 1 + summed
        same_width = [tensor[:24] for tensor in turned[wide:]]
        yield Call("not contiguous", arguments([*(tensor.t() for tensor in turned[:wide]), *same_width]))
        special = drawn(draw, (12,), 64, summed=summed, bias=centred, gain=draw.dtype)
        strange = draw.with_specials(12, 64)
        strange = strange.clamp(-100, 100).where(strange.isfinite(), strange)  # squares of the largest overflow
        yield Call("inf and nan", arguments([strange, *special[1:]]))
        small = drawn(draw, (6,), 64, summed=summed, bias=centred, gain=draw.dtype)
        yield Call("eps decides", arguments([tensor * 1e-3 for tensor in small[:wide]] + small[wide:]))

    return generate


PROOFS = (
    proof_of("layer_norm", calls(centred=True, summed=False), limits=LIMITS),
    proof_of("rms_norm", calls(centred=False, summed=False), limits=LIMITS),
    proof_of("add_layer_norm", calls(centred=True, summed=True), limits=LIMITS),
    proof_of("add_rms_norm", calls(centred=False, summed=True), limits=LIMITS),
)
