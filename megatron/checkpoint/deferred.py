"""Tensors that are read when they are written: whoever writes them has one at a time in memory, however large the model
is."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class Deferred(Tensor):
    """Its shape and dtype are known, its values come from `read`."""

    read: Callable[[], Tensor]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # results are plain

    @staticmethod
    def of(shape: Iterable[int], dtype: torch.dtype, read: Callable[[], Tensor]) -> Deferred:
        made: Deferred = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(Deferred)
        made.read = read
        return made

    def with_rows(self, rows: int) -> Deferred:
        """Followed by rows of zeros, up to so many."""
        return Deferred.of((rows, *self.shape[1:]), self.dtype, lambda: with_rows(self.read(), rows))


def with_rows(tensor: Tensor, rows: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, 0, 0, rows - tensor.shape[0]))


def values_of(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, Deferred):
        return tensor
    found = tensor.read()
    assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype), (found.shape, found.dtype, tensor)
    return found
