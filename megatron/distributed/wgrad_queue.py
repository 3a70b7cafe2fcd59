"""Weight gradients that are computed later than the backward pass that they belong to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch import Tensor, nn

Pending = tuple[nn.Parameter, Callable[[], Tensor]]


class WgradQueue:
    """Layers put the product that gives a weight's gradient here instead of computing it; `run` computes those of the
    oldest backward pass and hands each to `ready` (data parallelism's buffers, or the parameter itself)."""

    def __init__(self) -> None:
        self.ready: Callable[[nn.Parameter, Tensor], None] = add_to_parameter
        self._open: list[Pending] = []
        self._passes: deque[list[Pending]] = deque()

    def put(self, parameter: nn.Parameter, gradient: Callable[[], Tensor]) -> None:
        self._open.append((parameter, gradient))

    def end_of_pass(self) -> None:
        """What was put since the last call belongs to one backward pass."""
        self._passes.append(self._open)
        self._open = []

    def run(self) -> None:
        """The weight gradients of the oldest backward pass, last layer first."""
        for parameter, gradient in self._passes.popleft():
            self.ready(parameter, gradient())

    @property
    def empty(self) -> bool:
        return not self._open and not self._passes


def add_to_parameter(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient
