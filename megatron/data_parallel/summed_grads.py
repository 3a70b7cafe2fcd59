"""The gradients of a step as the optimizer finds them, where they are in buckets; see `Gradients`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.data_parallel.buckets import Slot
from megatron.data_parallel.divided_weights import DividedWeights
from megatron.data_parallel.gradients import FlatPieces


class SummedGrads(DividedWeights):
    flat: bool
    _lacking: list[str]

    def grad_dtype(self, name: str) -> torch.dtype:
        """The type in which the gradient is added up."""
        return self._slot(name).dtype

    def grad(self, name: str) -> Tensor:
        """The gradient in its accumulation type: a view of the buffer, so writing to it changes the gradient."""
        slot = self._slot(name)
        if slot.view is None:
            if slot.parameter.grad is None:
                slot.parameter.grad = torch.zeros_like(slot.parameter)
            return slot.parameter.grad
        if not slot.filled:
            self._fill_with_zeros(slot)
        assert slot.own is not None
        return slot.own

    def grads(self) -> Iterator[tuple[str, Tensor]]:
        """All gradients by name."""
        return ((name, self.grad(name)) for name in self._slots)

    @property
    def lacking(self) -> list[str]:
        """The parameters that got no gradient on this rank in this step; `reduce` has given them one of zero."""
        return self._lacking

    @property
    def counts_lacking(self) -> bool:
        """Whether `reduce` tells all ranks if one of them lacked a gradient. (The message of a divided buffer has no
        element for the count.)"""
        return all(bucket.count is not None for bucket in self._buckets)

    def some_rank_lacked(self) -> bool:
        """After `reduce`: whether any rank lacked a gradient. The same on all ranks."""
        return any(bucket.lacked for bucket in self._buckets)

    def runs(self) -> Iterator[tuple[str, Tensor]]:
        """After `reduce`: all gradients, those of one buffer as one tensor, each tensor with the name of its first
        parameter."""
        yield from ((bucket.slots[0].name, bucket.own) for bucket in self._buckets)
        yield from ((name, self.grad(name)) for name, slot in self._slots.items() if slot.view is None)

    def flat_buffers(self) -> Iterator[FlatPieces]:
        """Each gradient buffer with its weights, which become views of a flat tensor."""
        assert self.flat, "the gradients of some parameters are not in buffers"
        return (bucket.flat_pieces() for bucket in self._buckets)

    def multiply(self, factor: Tensor | float) -> None:
        """Multiplies every gradient by `factor`, a single number."""
        for bucket in self._buckets:
            bucket.own.mul_(factor)
        for slot in self._slots.values():
            if slot.view is None and slot.parameter.grad is not None:
                slot.parameter.grad.detach().mul_(factor)

    def _fill_with_zeros(self, slot: Slot) -> None:
        assert slot.view is not None
        slot.view.zero_()
        slot.filled = True
        if slot.shown:
            slot.parameter.grad = slot.view
