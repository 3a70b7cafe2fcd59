"""Rows of experts: the oracles are torch's functions in fp64."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.ops.expert_rows import ByExpert, RowGroups, places
from megatron.ops.operation import Function
from megatron.ops.proof.compare import Bounds, Call, Draw, Proof, proof_of
from megatron.ops.proof.rounding import Near, near
from megatron.ops.registry import OPERATIONS

# (tokens, choices of a token, rows of padding, dropped choices, width). Widths near the limits of the CUDA kernels: a
# pack, less than a pack, the columns of a warp, more than these, and odd widths, which are read number by number.
CASES = (
    (5, 2, 3, 4, 24),
    (1, 1, 0, 0, 1),
    (7, 3, 2, 1, 7),
    (9, 1, 1, 2, 8),
    (4, 2, 0, 0, 512),
    (3, 4, 2, 5, 1032),
    (2, 2, 1, 1, 1025),
    (3, 2, 2, 6, 16),  # no choice has a row
    (0, 2, 3, 0, 16),
    (3, 2, 0, 6, 16),  # no rows
    (70, 9, 40, 100, 40),
)


def order_of(source: Tensor, choices: int) -> ByExpert:
    """Describes the order of rows with these choices. The operations do not use its groups."""
    counts = torch.tensor([len(source)], device=source.device)
    return ByExpert(source, places(source, choices), RowGroups(counts, len(source)), has_padding=True, drops=True)


def drawn_source(draw: Draw, choices: int, padding: int, dropped: int) -> Tensor:
    """Draws the choices of rows in any order, with padding anywhere."""
    rows = torch.cat([torch.randperm(choices, generator=draw.generator)[dropped:], torch.full((padding,), -1)])
    return rows[torch.randperm(len(rows), generator=draw.generator)]


def cases(draw: Draw) -> Iterator[tuple[str, int, int, int, Tensor]]:
    """Name, tokens, choices of a token, width, source."""
    for tokens, per, padding, dropped, width in CASES:
        source = drawn_source(draw, tokens * per, padding, dropped)
        yield f"{tokens}x{width}, {per} each, {padding} padding, {dropped} dropped", tokens, per, width, source


def taken_calls(draw: Draw) -> Iterator[Call]:
    for name, tokens, per, width, source in cases(draw):
        yield Call(name, (draw(tokens, width), source, per), grads=(0,))
    source = drawn_source(draw, 12, 2, 3)
    yield Call("not contiguous", (draw(16, 6).t(), source, 2), grads=(0,))
    yield Call("off a pack", (draw(6, 17)[:, 1:], source, 2), grads=(0,))
    yield Call("inf and nan", (draw.with_specials(6, 40), source, 2), grads=(0,))


def sum_calls(draw: Draw) -> Iterator[Call]:
    for name, tokens, per, width, source in cases(draw):
        yield Call(name, (draw(len(source), width), source, draw(tokens, per)))
    source = drawn_source(draw, 12, 2, 3)
    yield Call("not contiguous", (draw(16, 11).t(), source, draw(2, 6).t()))
    yield Call("off a pack", (draw(11, 17)[:, 1:], source, draw(6, 2)))
    yield Call("inf and nan", (draw.with_specials(11, 40), source, draw(6, 2)))


def taken_bounds(args: Sequence[Any], upstreams: Sequence[Tensor]) -> tuple[list[Near], dict[int, Near]]:
    x, source, per = args
    return [_take(x, source, per)], {0: _terms(upstreams[0], source, len(x), per).sum(1)[:, 0]}


def sum_bounds(args: Sequence[Any], upstreams: Sequence[Tensor]) -> tuple[list[Near], dict[int, Near]]:
    rows, source, weights = args
    (tokens, per), dy = weights.shape, upstreams[0]
    terms = _terms(rows, source, tokens, per)
    of_rows = _take(dy, source, per) * _take(weights.reshape(-1, 1), source, 1)
    of_weights = (terms * dy.unsqueeze(1)).sum(2)[..., 0]
    return [(terms * weights.unsqueeze(2)).sum(1)[:, 0]], {0: of_rows, 2: of_weights}


def _take(x: Tensor, source: Tensor, per: int) -> Near:
    return near(torch.cat([x, x.new_zeros(1, x.shape[1])])[torch.where(source < 0, len(x), source // per)])


def _terms(rows: Tensor, source: Tensor, tokens: int, per: int) -> Near:
    """The row of each choice: [tokens, per, width]."""
    return _take(rows, places(source, tokens * per), 1).map(lambda tensor: tensor.view(tokens, per, rows.shape[1]))


# ---------------------------------------------------------------- the operations as functions of tensors


def taken_by(operation: Function) -> Function:
    return lambda x, source, per: operation(x, order_of(source, len(x) * per), per)


def sum_by(operation: Function) -> Function:
    return lambda rows, source, weights: operation(rows, order_of(source, weights.numel()), weights)


def proof_by_tensors(name: str, by_tensors: Callable[[Function], Function], calls: Any, bounds: Bounds) -> Proof:
    operation = OPERATIONS[name]
    native, formula = operation.native, operation.formula
    assert native is not None and formula is not None
    bound = native.bound
    return proof_of(name, calls, bounds, kernel=lambda ops: by_tensors(bound(ops)), oracle=by_tensors(formula))


PROOFS = (
    proof_by_tensors("taken", taken_by, taken_calls, taken_bounds),
    proof_by_tensors("weighted_sum", sum_by, sum_calls, sum_bounds),
)
