"""Weight gradients that are computed later than the backward pass that they belong to."""

from __future__ import annotations

from collections import deque

from torch import Tensor, nn

from megatron.ops.wgrad import Wgrads

Product = tuple[nn.Parameter, Tensor, Tensor]
"""(parameter, grad, x): the gradient of the parameter is grad.t() @ x of grad [tokens, out] and x [tokens, in]."""


class AddToParameter:
    """The gradient goes where backward would have put it."""

    def put(self, parameter: nn.Parameter, grad: Tensor, x: Tensor) -> None:
        gradient = grad.t() @ x
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad += gradient


class WgradQueue:
    """Keeps the products of every backward pass; `run` hands those of the oldest one to `then` (data parallelism's
    buffers, or the parameters themselves)."""

    def __init__(self) -> None:
        self.then: Wgrads = AddToParameter()
        self._open: list[Product] = []
        self._passes: deque[list[Product]] = deque()

    def put(self, parameter: nn.Parameter, grad: Tensor, x: Tensor) -> None:
        self._open.append((parameter, grad, x))

    def end_of_pass(self) -> None:
        """What was put since the last call belongs to one backward pass."""
        self._passes.append(self._open)
        self._open = []

    def run(self) -> None:
        """The weight gradients of the oldest backward pass, last layer first."""
        for product in self._passes.popleft():
            self.then.put(*product)

    @property
    def empty(self) -> bool:
        return not self._open and not self._passes
