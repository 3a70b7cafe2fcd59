"""Norms: the oracles are the plain formulas in fp64."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.ops.proof.compare import Bounds, Call, Draw, Proof, proof_of
from megatron.ops.proof.rounding import Near, U, constant, inverse_root, near, rounded

EPS = 1e-5
# Widths near every limit of the CUDA kernels: one pack, less than a pack, the columns of a warp, those of a block, more
# than a block, and odd widths, which are read number by number. 530 rows give more partial sums than a block adds at
# once.
SHAPES = ((0, 8), (1, 3), (5, 7), (530, 8), (70, 64), (3, 1000), (3, 1001), (9, 1024), (4, 1032), (2, 8200), (1, 8203))


def calls(*, centred: bool, summed: bool) -> Callable[[Draw], Iterator[Call]]:
    wide = 1 + summed  # number of wide arguments: x, and perhaps a residual

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
        most = min(1e15, torch.finfo(draw.dtype).max)  # squares of the largest fp32 numbers overflow
        strange = strange.clamp(-most, most).where(strange.isfinite(), strange)
        yield Call("inf and nan", (strange, *special[1:]))
        small = drawn((6,), 64)
        yield Call("eps decides", (*(tensor * 1e-3 for tensor in small[:wide]), *small[wide:]))

    return generate


def norm_bounds(*, centred: bool, summed: bool) -> Bounds:
    """Bounds of the kernels' formulas; see csrc/norm/cpu.cpp."""

    def of_call(args: Sequence[Any], upstreams: Sequence[Tensor]) -> tuple[list[Near], dict[int, Near]]:
        x, weight, eps, grad = args[0], args[1 + summed], args[-1], near(upstreams[0])
        bias = args[2 + summed] if centred else None
        total = (near(x) + args[1]).stored(x.dtype) if summed else near(x)
        apart = total - total.mean(-1) if centred else total
        scale = inverse_root((apart * apart).mean(-1) + constant(eps), eps)
        normed = apart * scale
        out = (normed if centred else normed.stored(x.dtype)) * weight
        scaled = grad * weight
        parts = [scaled, normed * (scaled * normed).mean(-1), *([scaled.mean(-1)] if centred else [])]
        of_x = (parts[0] - parts[1] - parts[2] if centred else parts[0] - parts[1]) * scale
        # The CPU kernel multiplies each part by the scale, and one part by the third power of the scale.
        of_x = rounded(of_x.value, of_x.error + 4 * U * sum((part * scale).value.abs() for part in parts))
        if summed:
            of_x = of_x + upstreams[1]
        gradients = dict.fromkeys(range(1 + summed), of_x)
        gradients[1 + summed] = _over_rows(grad * normed)
        if bias is not None:
            out, gradients[2 + summed] = out + bias, _over_rows(grad)
        return [out, total] if summed else [out], gradients

    return of_call


def _over_rows(terms: Near) -> Near:
    return terms.map(lambda tensor: tensor.flatten(0, -2)).sum(0)[0]


def proof(name: str, *, centred: bool, summed: bool) -> Proof:
    kind = {"centred": centred, "summed": summed}
    return proof_of(name, calls(**kind), norm_bounds(**kind))


PROOFS = (
    proof("layer_norm", centred=True, summed=False),
    proof("rms_norm", centred=False, summed=False),
    proof("add_layer_norm", centred=True, summed=True),
    proof("add_rms_norm", centred=False, summed=True),
)
