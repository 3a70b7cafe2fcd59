"""Weight gradients as products: a linear layer hands over the two factors instead of letting autograd multiply them.

Whoever takes the products (the gradient buffers) multiplies straight into the place where they are summed up, at once
or, in a zero-bubble pipeline, later than the backward pass that they belong to.
"""

from collections import Counter, deque
from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron.ops.wgrad import Wgrads

Product = tuple[nn.Parameter, Tensor, Tensor]
"""(parameter, grad, x): the gradient of the parameter is grad.t() @ x of grad [tokens, out] and x [tokens, in]."""

Put = Callable[[Tensor, Tensor], None]
"""Takes the factors (grad, x) of one parameter."""


def flat(x: Tensor) -> Tensor:
    """[..., features] -> [tokens, features]."""
    return x.reshape(-1, x.shape[-1])


class AddToParameter:
    """Adds the product to `parameter.grad`, where backward would have put it."""

    def put(self, parameter: nn.Parameter, grad: Tensor, x: Tensor) -> None:
        gradient = grad.t() @ x
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad += gradient


class WgradRoute:
    """What the linear layers of one model are given when they are made. Autograd computes their weight gradients until
    the route is connected to somebody who takes products."""

    deferred = False
    """Whether products are kept until `run` is called."""

    def __init__(self) -> None:
        self._sink: Wgrads | None = None
        self._shared: frozenset[int] = frozenset()

    def connect(self, sink: Wgrads, model: nn.Module) -> None:
        """From now on the products go to `sink`. A weight that several modules of `model` hold is left to autograd: it
        gets gradients on other ways too, and the two must not be mixed."""
        uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
        self._sink, self._shared = sink, frozenset(weight for weight, count in uses.items() if count > 1)

    @property
    def connected(self) -> bool:
        return self._sink is not None

    def takes(self, x: Tensor, weight: nn.Parameter) -> bool:
        """Whether the gradient of `weight` is to be handed over. Not under torch.compile, nor without a gradient of the
        input (backward would pass the layer by), nor where a hook wants to see the weight's gradient."""
        if torch.compiler.is_compiling() or self._sink is None or id(weight) in self._shared:
            return False
        return x.requires_grad and weight.requires_grad and torch.is_grad_enabled() and not weight._backward_hooks

    def put(self, parameter: nn.Parameter, grad: Tensor, x: Tensor) -> None:
        assert self._sink is not None, "a product was sent before the route was connected"
        self._sink.put(parameter, grad, x)


class WgradQueue(WgradRoute):
    """Keeps the products of every backward pass; `run` hands on those of the oldest one."""

    deferred = True

    def __init__(self) -> None:
        super().__init__()
        self._sink = AddToParameter()
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
            super().put(*product)

    @property
    def empty(self) -> bool:
        return not self._open and not self._passes
