"""Error bounds of a kernel's numbers: arithmetic on values that carry a bound of their error.

A `Near` holds a number in fp64 and a bound on its error in a kernel, which computes in fp32. Every operation propagates
the errors of its arguments and adds its own rounding. The bound of a result follows from its formula and holds for
every input, so a correct kernel passes with every seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

U = 2.0**-24  # the largest relative error of a rounding to fp32
SUBNORMAL = 2.0**-149  # the largest absolute error of a rounding to a subnormal number
LOWEST = -87.0  # exp may be flushed to 0 below this
# The largest relative error of exp; see csrc/common/math.h. Short forms serve 16-bit results, and on a GPU round their
# argument once more.
EXP, EXP_SHORT = 2.0**-22, 2.0**-18
OF_FP64 = 2.0**-51  # error of formulas such as 1 + tanh(x), which lose small results even in fp64


@dataclass(frozen=True)
class Near:
    value: Tensor
    error: Tensor

    def __add__(self, other: Operand) -> Near:
        other = near(other)
        return rounded(self.value + other.value, self.error + other.error)

    def __sub__(self, other: Operand) -> Near:
        return self + -near(other)

    def __neg__(self) -> Near:
        return Near(-self.value, self.error)

    def __mul__(self, other: Operand) -> Near:
        other = near(other)
        error = self.value.abs() * other.error + self.error * other.value.abs() + self.error * other.error
        return rounded(self.value * other.value, error)

    def __truediv__(self, other: Operand) -> Near:
        other = near(other)
        return self * _between(Tensor.reciprocal, other)

    def __matmul__(self, other: Operand) -> Near:
        other = near(other)
        mine, theirs = self.value.abs() + self.error, other.value.abs() + other.error
        error = mine @ other.error + self.error @ other.value.abs() + self.value.shape[-1] * U * (mine @ theirs)
        return rounded(self.value @ other.value, error)

    def __getitem__(self, index: object) -> Near:
        return Near(self.value[index], self.error[index])  # type: ignore[index]

    def sum(self, dim: int) -> Near:
        """Sums over a dimension and keeps it."""
        terms = (self.value.abs() + self.error).sum(dim, keepdim=True)
        error = self.error.sum(dim, keepdim=True) + depth(self.value.shape[dim]) * U * terms
        return rounded(self.value.sum(dim, keepdim=True), error)

    def mean(self, dim: int) -> Near:
        return self.sum(dim) / max(1, self.value.shape[dim])

    def stored(self, dtype: torch.dtype) -> Near:
        """Rounds to the nearest number of a dtype."""
        return self if dtype.itemsize > 2 else Near(self.value, self.error + half_ulp(self, dtype))

    def as_fp32(self) -> Near:
        """Rounds a number, computed in fp64, once to fp32."""
        ends = (self.value + sign * self.error for sign in (-1, 1))
        error = torch.stack([(end.float().double() - self.value).abs() for end in ends]).amax(0)
        return Near(self.value, torch.where(self.value.isinf(), 0.0, error))

    def map(self, function: Callable[[Tensor], Tensor]) -> Near:
        """Applies a function that moves numbers without changing them."""
        return Near(function(self.value), function(self.error))


Operand = Near | Tensor | float


def near(value: Operand) -> Near:
    """Converts numbers that are exact in a kernel."""
    if isinstance(value, Near):
        return value
    wide = torch.as_tensor(value, dtype=torch.float64) if isinstance(value, int | float) else value.detach().double()
    return Near(wide, torch.zeros_like(wide))


def constant(value: float) -> Near:
    """Converts a constant that fp32 may have to round."""
    wide = torch.tensor(value, dtype=torch.float64)
    return Near(wide, wide.abs() * U)


def rounded(value: Tensor, error: Tensor, times: int = 1) -> Near:
    """Makes a result that fp32 arithmetic has rounded `times` times."""
    return Near(value, error * (1 + times * U) + value.abs() * (times * U) + times * SUBNORMAL)


def depth(terms: int) -> int:
    """Largest number of roundings of one term in a sum of `terms` terms. Each lane or thread sums at most every eighth
    number, and parts of rows are summed 64 at a time."""
    return min(terms, 80 + terms // 8)


def half_ulp(number: Near, dtype: torch.dtype) -> Tensor:
    """Largest error of rounding the number to a dtype."""
    bits, least = {torch.float32: (24, -126), torch.bfloat16: (8, -126), torch.float16: (11, -14)}[dtype]
    size = number.value.abs() + number.error
    exponent = torch.where(size == 0, least, torch.frexp(size).exponent - 1)
    return torch.ldexp(torch.ones_like(number.value), exponent.clamp(min=least) - bits)


def concatenated(*parts: Near) -> Near:
    """Concatenates along the last dimension."""
    return Near(torch.cat([part.value for part in parts], -1), torch.cat([part.error for part in parts], -1))


def _between(function: Callable[[Tensor], Tensor], x: Near, least: float = 0.0) -> Near:
    """Applies a monotonic function to the magnitude, which is at least `least`, and keeps the sign."""
    sign, size = x.value.sign(), x.value.abs()
    here, low, high = (function(end) for end in (size, (size - x.error).clamp(min=least), size + x.error))
    return rounded(sign * here, torch.maximum((low - here).abs(), (high - here).abs()), times=2)


def root(x: Near) -> Near:
    return _between(Tensor.sqrt, x)


def inverse_root(x: Near, least: float) -> Near:
    return _between(Tensor.rsqrt, x, least * (1 - 4 * U))


# ---------------------------------------------------------------- exponentials


def _exp_error(x: Near, short: bool) -> Tensor:
    """Relative error of exp, without flushing to 0. Beyond 100, exp, or the number that is added to it, is 0."""
    return torch.expm1(x.error.clamp(max=1.0)) + (EXP_SHORT + 2 * U * x.value.abs().clamp(max=100.0) if short else EXP)


def exp(x: Near, short: bool) -> Near:
    value = x.value.exp()
    error = value * _exp_error(x, short) + torch.where(x.value < LOWEST, value, 0.0)
    return Near(value, torch.where(value == 0, 0.0, error))


def logistic(x: Near, short: bool) -> tuple[Near, Near]:
    """Returns 1 / (1 + exp(-x)) and its complement to 1; see `logistic_of_minus` in csrc/activation/math.h."""
    value, complement = torch.sigmoid(x.value), torch.sigmoid(-x.value)
    spread = value * complement * _exp_error(x, short)
    error = spread + 4 * U * value
    error_of_complement = error + U if short else spread + 6 * U * complement
    full = x.value > 17.5  # 1 + exp(-x) is 1
    error = torch.where(full, complement, error) + torch.where(x.value < LOWEST, value, 0.0)
    gone = x.value > (17.5 if short else -LOWEST)
    error_of_complement = torch.where(gone, complement, error_of_complement)
    return Near(value, error + value.clamp(max=OF_FP64)), Near(
        complement, error_of_complement + complement.clamp(max=OF_FP64)
    )


def normal(x: Near, short: bool) -> tuple[Near, Near]:
    """Returns the normal distribution function and its density; see `normal` in csrc/activation/math.h."""
    value, tail = (torch.special.erfc(sign * x.value * 0.5**0.5) / 2 for sign in (-1, 1))
    tail = torch.minimum(value, tail)
    square = (x.value.square() / 2).clamp(max=1000.0)
    density = torch.exp(-square) * 0.3989422804014327
    relative = 2.0**-17 + 2 * U * square if short else 16 * U
    flushed = (-square < LOWEST).double()
    error = tail * (relative + flushed) + U * torch.where(x.value > 0, value, 0.0)
    return Near(value, error + value.clamp(max=OF_FP64)), Near(density, density * (relative + flushed))


# ---------------------------------------------------------------- softmax


def shares(scores: Near, short: bool) -> tuple[Near, Near, Near]:
    """Returns exp(score - largest), their sum over the last dimension, and the largest. The bounds include an online
    softmax, which rescales the sum by an exponential whenever it meets a larger score."""
    peak = scores.value.amax(-1, keepdim=True)
    highest = scores.value + scores.error >= (scores.value - scores.error).amax(-1, keepdim=True)
    at_peak = torch.where(highest, scores.error, 0.0).amax(-1, keepdim=True)
    shift = Near(torch.where(peak == -torch.inf, 0.0, peak), at_peak)
    difference = scores - shift
    # If all candidates for the largest are equal, the largest is subtracted from itself.
    itself = (highest & (scores.value == peak)) & (highest == (scores.value == peak)).all(-1, keepdim=True)
    difference = Near(difference.value, torch.where(itself, 0.0, difference.error))
    kept = exp(difference, short)
    total = kept.sum(-1)
    times = scores.value.shape[-1] // 64 + 4
    error = times * ((EXP_SHORT if short else EXP) + 2 * U) * total.value
    # In an online softmax, the differences between successive maxima add up to `difference` and are rounded too.
    apart = torch.where(kept.value == 0, 0.0, kept.value * difference.value.abs()).sum(-1, keepdim=True)
    return kept, Near(total.value, total.error + error + 4 * U * apart), shift


def log(x: Near) -> Near:
    """Natural logarithm, computed in fp64."""
    return Near(x.value.log(), -torch.log1p(-(x.error / x.value).clamp(max=0.9)))
