"""Cross-entropy: the oracle is the plain formula; what works in place works on copies here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.ops.cross_entropy import cross_entropy
from megatron.ops.proof.compare import Call, Draw, Proof, proof_of
from megatron.utils.dtype import widened


def logits_and_labels(draw: Draw) -> Iterator[tuple[str, Tensor, Tensor]]:
    for rows, columns in ((1, 1), (3, 2), (5, 7), (4, 1000), (2, 1024), (2, 50257)):
        yield f"{rows}x{columns}", draw(rows, columns), draw.integers(columns, rows)
    yield "a last and a first label", draw(2, 33), torch.tensor([32, 0])
    yield "rows that begin anywhere", draw(5, 100)[:, 3:94], draw.integers(91, 5)
    yield "far apart", draw(3, 300, spread=60.0), draw.integers(300, 3)
    yield "larger than exp can take", draw(3, 40, spread=1.0).add_(300.0), draw.integers(40, 3)
    yield "equal", torch.full((2, 999), -3.0, dtype=draw.dtype), draw.integers(999, 2)


def strange_logits(draw: Draw) -> Iterator[tuple[str, Tensor, Tensor]]:
    labels = torch.tensor([1, 2, 3, 4, 5])
    yield "inf and nan", draw.with_specials(5, 64), labels
    logits = draw(5, 70)
    logits[0, 40], logits[1, 2], logits[2, 3], logits[3, :] = torch.inf, torch.inf, -torch.inf, -torch.inf
    logits[4, 69] = torch.nan
    yield "one inf", logits, labels


def whole_calls(draw: Draw) -> Iterator[Call]:
    yield Call("no rows", (draw(0, 9), draw.integers(9, 0)))
    for name, logits, labels in (*logits_and_labels(draw), *strange_logits(draw)):
        yield Call(name, (logits, labels))
    yield Call("columns side by side", (draw(40, 6).t(), draw.integers(40, 6)))


def in_place(ops: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def function(logits: Tensor, labels: Tensor, padding: int) -> tuple[Tensor, Tensor]:
        width = logits.shape[1]
        buffer = F.pad(logits, (0, padding), value=torch.nan)
        return ops.xent_in_place_(buffer, labels, width), buffer

    return function


def in_place_oracle(logits: Tensor, labels: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    loss, gradient = _loss_and_gradient(logits, labels, torch.ones(len(labels), dtype=widened(logits).dtype))
    return loss, F.pad(gradient, (0, padding))


def in_place_calls(draw: Draw) -> Iterator[Call]:
    yield Call("no rows", (draw(0, 9), draw.integers(9, 0), 0), grads=())
    for padding, (name, logits, labels) in enumerate(logits_and_labels(draw)):
        yield Call(name, (logits, labels, padding), grads=())


def split(ops: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """As ranks that hold the columns up to every one of `ends`; the last has one more row of padding."""

    def function(logits: Tensor, labels: Tensor, grad: Tensor, ends: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        firsts, vocabulary = (0, *ends[:-1]), ends[-1]
        pieces = [F.pad(logits[:, a:b], (0, 1), value=torch.nan) for a, b in zip(firsts, ends)]
        parts = torch.stack([ops.xent_statistics(piece, labels, first, piece.shape[1] - 1, vocabulary)
                             for first, piece in zip(firsts, pieces)])  # fmt: skip
        peak = parts[:, 0].amax(0)
        log_sum = (parts[:, 1] * torch.exp(parts[:, 0] - peak)).sum(0).log()
        for first, piece in zip(firsts, pieces):
            ops.xent_gradient_(piece, labels, peak + log_sum, grad, first, piece.shape[1] - 1)
        assert all((piece[:, -1] == 0).all() for piece in pieces), "padding has a gradient"
        return log_sum - (parts[:, 2].sum(0) - peak), torch.cat([piece[:, :-1] for piece in pieces], dim=1)

    return function


def split_oracle(logits: Tensor, labels: Tensor, grad: Tensor, ends: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return _loss_and_gradient(logits, labels, grad)


def split_calls(draw: Draw) -> Iterator[Call]:
    for name, logits, labels in logits_and_labels(draw):
        columns = logits.shape[1]
        ends = (columns // 3, columns // 2, columns, columns)  # of few columns some ranks hold none, the last never
        yield Call(name, (logits, labels, draw(len(labels), dtype=torch.float32), ends), grads=())


def _loss_and_gradient(logits: Tensor, labels: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    wide = widened(logits)
    gradient = torch.softmax(wide, dim=-1)
    gradient[torch.arange(len(labels)), labels] -= 1.0
    return cross_entropy(logits, labels), (gradient * grad[:, None].to(wide.dtype)).to(logits.dtype)


def linear_calls(draw: Draw) -> Iterator[Call]:
    for tokens, hidden, vocabulary, rows in ((7, 4, 11, 11), (40, 16, 50, 64), (300, 8, 1000, 1024)):
        labels = draw.integers(vocabulary, tokens)
        yield Call(f"{tokens}x{vocabulary} of {rows}", (draw(tokens, hidden), draw(rows, hidden), labels, vocabulary))


def proof_by(name: str, kernel: Callable[[Any], Any], oracle: Callable[..., Any], calls: Any, **limits: Any) -> Proof:
    return Proof(name=name, folder="cross_entropy", kernel=kernel, oracle=oracle, calls=calls, **limits)


PROOFS = (
    proof_of("cross_entropy", whole_calls),
    proof_by("xent_in_place", in_place, in_place_oracle, in_place_calls),
    # What it is computed from, log_sum_exp, is rounded to fp32.
    proof_by("xent_split", split, split_oracle, split_calls, limits={torch.float32: 1e-5}),
    proof_of(
        "linear_cross_entropy",
        linear_calls,
        limits={torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3},  # its logits are rounded
        as_near_as_ref=2.5,  # few labels: one gradient that is rounded otherwise is seen in all of the weight's
    ),
)
