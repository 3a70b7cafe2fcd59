"""Recomputation of activations in the backward pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megatron.config import RecomputeConfig

T = TypeVar("T")


class Recomputation:
    """Recomputes activations of one model in its backward pass."""

    def __init__(self) -> None:
        self._kept: list[Any] | None = None
        self._again: Iterator[Any] | None = None

    def call(self, function: Callable[..., Any], recomputed: bool, *arguments: Any) -> Any:
        """Calls `function(*arguments)`. If `recomputed` and gradients are enabled, backward calls it again instead of
        keeping its activations."""
        if not (recomputed and torch.is_grad_enabled()):
            return function(*arguments)
        kept: list[Any] = []
        # The random state is restored, so that dropout drops the same elements again.
        return checkpoint(
            function,
            *arguments,
            use_reentrant=False,
            preserve_rng_state=True,
            context_fn=lambda: (self._keeping(kept, None), self._keeping(None, iter(kept))),
        )

    @contextmanager
    def instead_of(self, value: Tensor, again: Callable[[], Tensor], recomputed: bool) -> Iterator[None]:
        """Makes functions in this context keep `again` for backward instead of `value`, if `recomputed`. `again` must
        return the same value. It uses no random numbers, and only tensors that are kept anyway."""
        if not (recomputed and torch.is_grad_enabled()):
            yield
            return

        place = _place(value)  # autograd keeps `pack`, which must not keep the value

        def pack(kept: Tensor) -> Tensor | Callable[[], Tensor]:
            return partial(_computed, again, kept.shape) if _place(kept) == place else kept

        with saved_tensors_hooks(pack, lambda kept: kept if isinstance(kept, Tensor) else kept()):
            yield

    def once(self, make: Callable[[], T]) -> T:
        """Returns `make()`. When `call` calls a function again, returns the value of the first time, so that ranks do
        not exchange numbers twice and the host does not wait twice."""
        value = make() if self._again is None else next(self._again)
        if self._kept is not None:
            self._kept.append(value)
        return value

    @contextmanager
    def _keeping(self, kept: list[Any] | None, again: Iterator[Any] | None) -> Iterator[None]:
        before = self._kept, self._again
        self._kept, self._again = kept, self._again if again is None else again
        try:
            yield
        finally:
            self._kept, self._again = before


@torch.no_grad()
def _computed(again: Callable[[], Tensor], shape: torch.Size) -> Tensor:
    return again().view(shape)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Identifies the memory of a tensor. A tensor of another shape over the same elements has the same place."""
    contiguous = tensor.is_contiguous()
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel(), tensor.dtype, contiguous


def groups(config: RecomputeConfig, count: int) -> list[tuple[range, bool]]:
    """Splits `count` layers into groups of consecutive layers, by the settings: (positions, True if recomputed)."""
    step = config.recompute_num_layers
    if not config.full:
        return [(range(count), False)]
    if config.recompute_method == "block":
        first = min(step, count)
        return [(range(i, i + 1), True) for i in range(first)] + [(range(first, count), False)]
    return [(range(start, min(start + step, count)), True) for start in range(0, count, step)]
