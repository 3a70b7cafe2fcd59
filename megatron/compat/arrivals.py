"""Detects the last gradient of a backward pass, for loops that call nothing after `backward()`."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node


class Arrivals:
    """Calls `finish` within the backward pass, after every expected parameter has its gradient."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        begun: Callable[[], None],
        finish: Callable[[], None],
        surprised: Callable[[Tensor], None] = lambda _: None,
    ) -> None:
        """`begun` runs before the first gradient is counted, `surprised` for each gradient that this pass does not
        expect."""
        self._parameters = list(parameters)
        self._begun, self._finish, self._surprised = begun, finish, surprised
        self._expected: set[int] | None = None
        self._left_out: set[int] = set()
        self._came: set[int] = set()
        self._hooks = [one.register_post_accumulate_grad_hook(self._arrived) for one in self._parameters]

    def expect(self, parameters: Collection[nn.Parameter]) -> None:
        """Starts a pass: `finish` runs once all of `parameters` have their gradients."""
        self._came.clear()
        self._expected = {id(one) for one in parameters}
        self._left_out = {id(one) for one in self._parameters} - self._expected

    def cancel(self) -> None:
        """Stops expecting a pass: gradients only accumulate."""
        self._end()
        self._left_out = set()

    def _end(self) -> None:
        self._expected = None
        self._came.clear()

    @property
    def awaited(self) -> list[nn.Parameter]:
        """Parameters still without a gradient, if a pass has begun and not finished."""
        if self._expected is None or not self._came:
            return []
        return [one for one in self._parameters if id(one) in self._expected and id(one) not in self._came]

    def _arrived(self, parameter: Tensor) -> None:
        if id(parameter) in self._left_out:
            self._surprised(parameter)
        if self._expected is None:
            return
        if not self._came:
            self._begun()
        self._came.add(id(parameter))
        if self._came >= self._expected:
            self._end()
            self._finish()


def reached(output: Any) -> set[int]:
    """Returns the ids of the leaf tensors that a backward pass from `output` reaches."""
    found: set[int] = set()
    waiting = [tensor.grad_fn for tensor in _tensors(output) if tensor.grad_fn is not None]
    found |= {id(tensor) for tensor in _tensors(output) if tensor.is_leaf and tensor.requires_grad}
    seen: set[Node] = set(waiting)
    while waiting:
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
