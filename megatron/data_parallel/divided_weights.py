"""The pieces of weights that a rank updates, of parameters whose gradients are in buckets; see `Gradients`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import torch
from torch import nn

from megatron.data_parallel.buckets import Bucket, Slot
from megatron.distributed.state import Axis
from megatron.state.division import Division, Range


class DividedWeights:
    _slots: Mapping[str, Slot]
    _names_of_tied: Mapping[str, str]
    _buckets: Sequence[Bucket]
    _divided: Set[str]
    """The parameters whose buckets are divided over the ranks."""
    _gathers_late: bool
    """Whether the next forward pass runs while weights are gathered."""

    @property
    def device(self) -> torch.device:
        return next((slot.parameter.device for slot in self._slots.values()), torch.device("cpu"))

    @property
    def names(self) -> tuple[str, ...]:
        """Every trainable parameter once, in the order given; a tied one under its first name."""
        return tuple(self._slots)

    def parameter(self, name: str) -> nn.Parameter:
        return self._slot(name).parameter

    def weight(self, name: str) -> torch.Tensor:
        slot = self._slot(name)
        if slot.name not in self._divided:
            return slot.parameter
        bucket = self._buckets[slot.bucket]
        return bucket.flatten_weights()[slice(*bucket.piece(slot))]

    def held(self, name: str) -> Range:
        slot = self._slot(name)
        if slot.name not in self._divided:
            return 0, slot.parameter.numel()
        start, stop = self._buckets[slot.bucket].piece(slot)
        return start - slot.place[0], stop - slot.place[0]

    def piece_of(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        if self.divided_over(name).size == 1:
            return whole
        start, stop = self.held(name)
        return whole.view(-1)[start:stop]

    def whole_of(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        slot = self._slot(name)
        return self._buckets[slot.bucket].whole_of(slot, piece) if slot.name in self._divided else piece

    def divided_over(self, name: str) -> Axis:
        slot = self._slot(name)
        return slot.axis if slot.name in self._divided else Axis.single(slot.axis.name)

    def division(self, name: str) -> Division | None:
        slot = self._slot(name)
        if slot.name not in self._divided:
            return None
        chunk = self._buckets[slot.bucket].chunk
        return Division(slot.axis.members, slot.parameter.numel(), chunk[1] - chunk[0], slot.place[0])

    def replicas(self, name: str) -> Axis:
        return self._slot(name).axis

    def publish(self) -> None:
        """Gathers the weights of the divided buffers, those that the next forward needs first at the front."""
        self.wait_for_weights()
        for bucket in reversed(self._buckets):
            if bucket.divided:
                bucket.start_gather()
        if not self._gathers_late:
            self.wait_for_weights()

    def wait_for_weights(self) -> None:
        for bucket in reversed(self._buckets):
            bucket.finish_gather()

    def _slot(self, name: str) -> Slot:
        return self._slots[self._names_of_tied.get(name, name)]
