"""Weight gradients as products: a linear layer hands over the two factors, and autograd does not multiply them.

The receiver (the gradient buffers) multiplies directly into the accumulated gradient, at once or, in a zero-bubble
pipeline, after the backward pass.
"""

from collections import Counter, deque
from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron.ops.wgrad import Wgrads

Product = tuple[nn.Parameter, Tensor, Tensor]
"""(parameter, grad, x): the parameter's gradient is grad.t() @ x, with grad [tokens, out] and x [tokens, in]."""

Put = Callable[[Tensor, Tensor], None]
"""Takes the factors (grad, x) of one parameter."""


def flat(x: Tensor) -> Tensor:
    """Reshapes [..., features] to [tokens, features]."""
    return x.reshape(-1, x.shape[-1])


class AddToParameter:
    """Adds the product to `parameter.grad`, as backward would."""

    def put(self, parameter: nn.Parameter, grad: Tensor, x: Tensor) -> None:
        gradient = grad.t() @ x
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad += gradient


class WgradRoute:
    """Passes the factors of weight gradients from the linear layers of one model to a sink (the gradient buffers).
    Until a sink is connected, autograd computes the weight gradients."""

    deferred = False
    """True if products are kept until `run` is called."""

    def __init__(self) -> None:
        self._sink: Wgrads | None = None
        self._shared: frozenset[int] = frozenset()

    def connect(self, sink: Wgrads, model: nn.Module) -> None:
        """Sends the products to `sink` from now on. Autograd still computes the gradients of weights that several
        modules share, because one of these modules may hand over no product."""
        uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
        self._sink, self._shared = sink, frozenset(weight for weight, count in uses.items() if count > 1)

    @property
    def connected(self) -> bool:
        return self._sink is not None

    def takes(self, x: Tensor, weight: nn.Parameter) -> bool:
        """True if the layer hands over the gradient of `weight`. False under torch.compile, if the input needs no
        gradient (backward would skip the layer), and if a hook needs the weight's gradient."""
        if torch.compiler.is_compiling() or self._sink is None or id(weight) in self._shared:
            return False
        return x.requires_grad and weight.requires_grad and torch.is_grad_enabled() and not weight._backward_hooks

    def put(self, parameter: nn.Parameter, grad: Tensor, x: Tensor) -> None:
        assert self._sink is not None, "put() was called before connect()"
        self._sink.put(parameter, grad, x)


class WgradQueue(WgradRoute):
    """Queues the products of every backward pass. `run` computes the oldest pass's products."""

    deferred = True

    def __init__(self) -> None:
        super().__init__()
        self._sink = AddToParameter()
        self._open: list[Product] = []
        self._passes: deque[list[Product]] = deque()

    def put(self, parameter: nn.Parameter, grad: Tensor, x: Tensor) -> None:
        self._open.append((parameter, grad, x))

    def end_of_pass(self) -> None:
        """Ends a backward pass: the products since the last call form one pass."""
        self._passes.append(self._open)
        self._open = []

    def run(self) -> None:
        """Computes the weight gradients of the oldest backward pass, last layer first."""
        for product in self._passes.popleft():
            super().put(*product)

    @property
    def empty(self) -> bool:
        return not self._open and not self._passes
