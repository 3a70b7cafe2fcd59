"""Cross-entropy: the oracle is the plain formula. In-place kernels work on copies here."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.ops.cross_entropy import cross_entropy
from megatron.ops.proof.compare import Bounds, Call, Draw, Proof, proof_of
from megatron.ops.proof.rounding import Near, U, exp, log, near, shares
from megatron.utils.dtype import widened


def logits_and_labels(draw: Draw) -> Iterator[tuple[str, Tensor, Tensor]]:
    for rows, columns in ((1, 1), (3, 2), (5, 7), (4, 1000), (2, 1024), (2, 50257)):
        yield f"{rows}x{columns}", draw(rows, columns), draw.integers(columns, rows)
    yield "a last and a first label", draw(2, 33), torch.tensor([32, 0])
    yield "rows that begin anywhere", draw(5, 100)[:, 3:94], draw.integers(91, 5)
    yield "far apart", draw(3, 300, spread=60.0), draw.integers(300, 3)
    yield "larger than exp can take", draw(3, 40, spread=1.0).add_(300.0), draw.integers(40, 3)
    usable = draw.with_specials(5, 64).nan_to_num(1.0, 2.0, -torch.inf)  # inf and NaN: see strange_logits
    yield "-inf, zeros, the largest and subnormal numbers", usable, torch.tensor([1, 2, 3, 4, 5])
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


def sharded_loss(ops: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Wraps the kernels of a split vocabulary. Rank i holds the columns from `ends[i - 1]` (or 0) to `ends[i]`, and one
    column of padding."""

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


def sharded_oracle(logits: Tensor, labels: Tensor, grad: Tensor, ends: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return _loss_and_gradient(logits, labels, grad)


def sharded_calls(draw: Draw) -> Iterator[Call]:
    for name, logits, labels in logits_and_labels(draw):
        columns = logits.shape[1]
        ends = (columns // 3, columns // 2, columns, columns)  # the last rank holds no column
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


# ---------------------------------------------------------------- bounds


@dataclass(frozen=True)
class _Row:
    """Intermediate values of the losses and gradients of all tokens."""

    logits: Near
    labels: Tensor
    short: bool

    @cached_property
    def parts(self) -> tuple[Near, Near, Near]:
        return shares(self.logits, self.short)

    @property
    def onehot(self) -> Tensor:
        return F.one_hot(self.labels, self.logits.value.shape[-1]).double()

    @property
    def log_sum_exp(self) -> Near:
        """Log-sum-exp, computed in fp64 from a sum in fp32."""
        _, total, peak = self.parts
        value = torch.logsumexp(self.logits.value, -1, keepdim=True)
        return Near(value, torch.where(value.isinf(), 0.0, log(total).error + peak.error))

    @property
    def target(self) -> Near:
        return self.logits.map(lambda tensor: tensor.gather(-1, self.labels[:, None]))

    @property
    def loss(self) -> Near:
        """Loss, rounded once."""
        found, target = self.log_sum_exp, self.target
        return Near(found.value - target.value, found.error + target.error)[:, 0]

    @property
    def loss_in_fp32(self) -> Near:
        _, total, peak = self.parts
        sizes = total.value.log().abs() + peak.value.abs() + self.target.value.abs()
        return Near(self.loss.value, self.loss.error + 8 * U * sizes[:, 0])

    def less_onehot(self, share: Near) -> Near:
        return share - self.onehot

    def by_log_sum(self, log_sum_exp: Near) -> Near:
        """Gradient, computed from a log-sum-exp."""
        return self.less_onehot(exp(self.logits - log_sum_exp, self.short))

    def by_factor(self) -> Near:
        kept, total, _ = self.parts
        return self.less_onehot(kept / total)


def _row(logits: Tensor, labels: Tensor) -> _Row:
    return _Row(near(logits), labels, logits.dtype.itemsize == 2)


def whole_bounds(args: Sequence[Any], upstreams: Sequence[Tensor]) -> tuple[list[Near], dict[int, Near]]:
    row = _row(*args)
    return [row.loss], {0: row.by_log_sum(row.log_sum_exp.as_fp32()) * upstreams[0][:, None]}


def in_place_bounds(args: Sequence[Any], _: Sequence[Tensor]) -> tuple[list[Near], dict[int, Near]]:
    logits, labels, padding = args
    row = _row(logits, labels)
    return [row.loss, row.by_factor().map(lambda tensor: F.pad(tensor, (0, padding)))], {}


def sharded_bounds(args: Sequence[Any], _: Sequence[Tensor]) -> tuple[list[Near], dict[int, Near]]:
    logits, labels, grad, _ = args
    row = _row(logits, labels)
    return [row.loss_in_fp32, row.by_log_sum(_in_fp32(row)) * grad[:, None]], {}


def _in_fp32(row: _Row) -> Near:
    _, total, peak = row.parts
    found = row.log_sum_exp
    return Near(found.value, found.error + 8 * U * (total.value.log().abs() + peak.value.abs()))


def linear_bounds(args: Sequence[Any], upstreams: Sequence[Tensor]) -> tuple[list[Near], dict[int, Near]]:
    """Bounds with logits and their gradient rounded to the dtype. In fp16 the gradient includes the token's factor."""
    hidden, weight, labels, vocabulary = args
    dtype, grad = hidden.dtype, upstreams[0][:, None]
    used = weight[:vocabulary]
    logits = (near(hidden) @ used.t()).stored(dtype)
    row = _Row(logits, labels, dtype.itemsize == 2)
    if dtype == torch.float16:
        slopes = (row.by_log_sum(_in_fp32(row)) * grad).stored(dtype)
        of_hidden, scaled = slopes @ used, near(hidden)
    else:
        slopes = row.by_factor().stored(dtype)
        of_hidden, scaled = (slopes @ used).stored(dtype) * grad, (near(hidden) * grad).stored(dtype)
    of_weight = (slopes.map(torch.t) @ scaled).map(lambda tensor: F.pad(tensor, (0, 0, 0, len(weight) - vocabulary)))
    return [row.loss_in_fp32], {0: of_hidden, 1: of_weight}


def proof_by(name: str, kernel: Callable[[Any], Any], oracle: Callable[..., Any], calls: Any, bounds: Bounds) -> Proof:
    return Proof(
        name=name,
        folder="cross_entropy",
        operation="linear_cross_entropy",
        kernel=kernel,
        oracle=oracle,
        calls=calls,
        bounds=bounds,
    )


PROOFS = (
    proof_of("cross_entropy", whole_calls, whole_bounds),
    proof_by("xent_in_place", in_place, in_place_oracle, in_place_calls, in_place_bounds),
    proof_by("xent_split", sharded_loss, sharded_oracle, sharded_calls, sharded_bounds),
    proof_of("linear_cross_entropy", linear_calls, linear_bounds, products=True),
)
