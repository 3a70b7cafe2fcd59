"""Norms: the oracles are the plain formulas in fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron.ops.proof.compare import Call, Draw, proof_of

EPS = 1e-5
LIMITS = {torch.float32: 1e-5}
# Widths beside every limit of the CUDA kernels: one number, no packs, a warp's columns, a block's, more than a block's;
# and odd ones as wide, which are read number by number.
SHAPES = ((0, 8), (1, 3), (5, 7), (70, 64), (3, 1000), (3, 1001), (9, 1024), (4, 1032), (2, 8200), (1, 8203))


def calls(*, centred: bool, summed: bool) -> Callable[[Draw], Iterator[Call]]:
    wide = 1 + summed  # of the arguments: x, and perhaps a residual

    def generate(draw: Draw) -> Iterator[Call]:
        def drawn(rows: tuple[int, ...], width: int, bias: bool = True, gain: torch.dtype = draw.dtype) -> list[Any]:
            x = draw(*rows, width, spread=2.0) + 0.5
            residual = [draw(*rows, width)] if summed else []
            weight = (1 + draw(width, spread=0.3, dtype=torch.float32)).to(gain)
            biases = [draw(width, dtype=gain) if bias else None] if centred else []
            return [x, *residual, weight, *biases, EPS]

        for rows, width in SHAPES:
            yield Call(f"{rows}x{width}", tuple(drawn((rows,), width)))
        yield Call("4 dimensions", tuple(drawn((2, 3, 5), 16)))
        yield Call("gain in fp32", tuple(drawn((40,), 24, gain=torch.float32)))
        gain = torch.bfloat16 if draw.dtype == torch.float32 else draw.dtype
        yield Call("gain in bf16", tuple(drawn((40,), 24, gain=gain)))
        if centred:
            yield Call("no bias", tuple(drawn((40,), 24, bias=False)))
        *turned, _ = drawn((24,), 40)
        turned = [tensor.t() for tensor in turned[:wide]] + [tensor[:24] for tensor in turned[wide:]]
        yield Call("not contiguous", (*turned, EPS))
        special = drawn((12,), 64)
        strange = draw.with_specials(12, 64)
        strange = strange.clamp(-100, 100).where(strange.isfinite(), strange)  # squares of the largest overflow
        yield Call("inf and nan", (strange, *special[1:]))
        small = drawn((6,), 64)
        yield Call("eps decides", (*(tensor * 1e-3 for tensor in small[:wide]), *small[wide:]))

    return generate


PROOFS = (
    proof_of("layer_norm", calls(centred=True, summed=False), limits=LIMITS),
    proof_of("rms_norm", calls(centred=False, summed=False), limits=LIMITS),
    proof_of("add_layer_norm", calls(centred=True, summed=True), limits=LIMITS),
    proof_of("add_rms_norm", calls(centred=False, summed=True), limits=LIMITS),
)
