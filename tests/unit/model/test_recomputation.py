"""Values that a recomputation takes from the first time: once per call, in order, in nested calls too."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.model.recompute import Recomputation


class Scaled:
    """Multiplies by numbers that `once` reads; counts the reads."""

    def __init__(self, recomputation: Recomputation) -> None:
        self.recomputation, self.read, self.calls = recomputation, 0, 0

    def next(self) -> int:
        self.read += 1
        return self.read

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        factors = [self.recomputation.once(self.next) for _ in range(2)]
        return (x * factors[0]).sin() * factors[1]


def gradient(recomputed: bool, calls: int = 3, nested: bool = False) -> tuple[Tensor, Scaled]:
    recomputation = Recomputation()
    scaled = Scaled(recomputation)

    def outer(x: Tensor) -> Tensor:
        return recomputation.call(scaled, nested, x)

    x = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
    sum(recomputation.call(outer, recomputed, x).sum() for _ in range(calls)).backward()
    assert x.grad is not None
    return x.grad, scaled


def test_a_recomputation_reads_nothing_again() -> None:
    plain, once = gradient(False)
    again, twice = gradient(True)
    assert torch.equal(plain, again)
    assert (once.calls, once.read) == (3, 6) and (twice.calls, twice.read) == (6, 6)


def test_nested_recomputations_read_nothing_again() -> None:
    plain, _ = gradient(False)
    again, scaled = gradient(True, nested=True)
    assert torch.equal(plain, again) and scaled.calls > 6 and scaled.read == 6


def test_without_gradients_nothing_is_kept() -> None:
    recomputation = Recomputation()
    scaled = Scaled(recomputation)
    with torch.no_grad():
        for _ in range(2):
            recomputation.call(scaled, True, torch.ones(1))
    assert scaled.read == 4 and recomputation._kept is None and recomputation._again is None


def test_an_error_leaves_no_open_recording() -> None:
    recomputation = Recomputation()

    def failing(x: Tensor) -> Tensor:
        recomputation.once(lambda: 1)
        raise ValueError("planted")

    try:
        recomputation.call(failing, True, torch.ones(1, requires_grad=True))
    except ValueError:
        pass
    assert recomputation._kept is None and recomputation._again is None
