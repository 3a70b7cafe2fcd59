"""Calls the gradient hooks that a program has set on parameters, with the gradient that the update uses."""

from collections.abc import Callable, Collection, Iterable, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.data_parallel import BucketStore, TrainingStore
from megatron.data_parallel.sharding_units import HOOKS_OF_GRADIENTS, taken_over
from megatron.distributed.messages import all_gather_json
from megatron.distributed.parallel_state import Axis
from megatron.errors import ConfigError

_BEFORE, _AFTER = HOOKS_OF_GRADIENTS
Hooks = MutableMapping[int, Callable[[Any], Any]]


@dataclass(frozen=True)
class _Hook:
    kind: str
    key: int
    call: Callable[[Any], Any]
    registered: Hooks
    """torch's dict, from which `handle.remove()` deletes the key."""


class GradientHooks:
    """Hooks that are called once per update, with the mean gradient over micro-batches and ranks. autograd would call
    them in every backward pass, with the gradient of one rank's micro-batch."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], dp: Axis) -> None:
        """Removes the hooks from autograd. Must be constructed before `BucketStore`, whose hooks stay. A collective."""
        self._parameters = {name: one for name, one in parameters if one.requires_grad}
        self._hooks = {name: hooks for name, one in self._parameters.items() if (hooks := list(_taken(one)))}
        here = {name: [hook.kind for hook in hooks] for name, hooks in self._hooks.items()}
        for other in all_gather_json(here, dp, dict[str, list[str]]):
            for name in {**here, **other}:
                if here.get(name) != other.get(name):
                    raise ConfigError(
                        f"megatron.compat.initialize(): the gradient hooks of {name} differ between ranks; they get "
                        "the gradient that was averaged over all ranks, so set the same hooks on all ranks"
                    )

    def refuse_those_after(self, stage: int) -> None:
        """Raises a ConfigError for a parameter with a hook that reads `parameter.grad`. The message names `stage`."""
        for name, hooks in self._hooks.items():
            if any(hook.kind == _AFTER for hook in hooks):
                raise ConfigError(
                    f"zero_optimization.stage {stage}: {name} has a hook of {_AFTER}(), but each rank has "
                    f"only a part of parameter.grad; use {_BEFORE}(), which gets the reduced gradient, or stage 1"
                )

    @torch.no_grad()
    def call(self, store: TrainingStore, factor: float, absent: Collection[str]) -> None:
        """Calls the hooks with the reduced gradients, which the store holds multiplied by `factor`. `absent`: the
        parameters without a gradient. A collective where ranks shard the gradients."""
        for name, hooks in self._hooks.items():
            if name in absent:
                continue
            piece = store.grad(name)
            grad = store.whole_of(name, piece) / factor
            for hook in hooks:
                if hook.key in hook.registered:
                    grad = self._called(hook, name, grad)
            piece.copy_(store.part_of(name, grad * factor))

    def _called(self, hook: _Hook, name: str, grad: Tensor) -> Tensor:
        if hook.kind == _BEFORE:
            result = hook.call(grad)
            result = grad if result is None else result
        else:
            parameter = self._parameters[name]
            kept, parameter.grad = parameter.grad, grad.to(parameter.dtype)
            hook.call(parameter)
            result, parameter.grad = parameter.grad, kept
        if not isinstance(result, Tensor) or result.shape != grad.shape:
            found = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ConfigError(
                f"the gradient hook of {name} returned {found} for a gradient of shape {tuple(grad.shape)}; return a "
                "tensor of that shape, or None"
            )
        return result.to(grad.dtype)


def _taken(parameter: nn.Parameter) -> Iterable[_Hook]:
    for kind, attribute in HOOKS_OF_GRADIENTS.items():
        registered: Hooks = getattr(parameter, attribute) or {}
        for key, call in registered.items():
            if not _is_of_an_engine(call):
                registered[key] = taken_over
                yield _Hook(kind, key, call, registered)


def _is_of_an_engine(call: Callable[[Any], Any]) -> bool:
    return isinstance(call, partial) and isinstance(getattr(call.func, "__self__", None), BucketStore)
