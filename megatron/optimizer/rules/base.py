"""Interface of update rules, and a way to skip an update without a host sync."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

ROWS, COLUMNS = "exp_avg_sq_row", "exp_avg_sq_col"
WHOLE_KINDS = (ROWS, COLUMNS)
"""Kinds of state with their own shape: every rank holds them for the whole parameter."""


@dataclass
class Slot:
    """One tensor that is updated, and its optimizer state."""

    name: str
    """Name of the parameter."""
    tensor: Tensor
    state: dict[str, Tensor]
    """Tensors by kind of state. A checkpoint has the same kinds, unless the rule stores another form there."""
    step: Tensor
    """Number of updates, on the device where the rule needs it."""


class Control(NamedTuple):
    """Numbers of one update."""

    lr: float
    weight_decay: float
    skip: Tensor | None = None
    """Device tensor: 0 applies the update, another number skips it. None: the update is applied. Only fused rules
    support it."""


class Slots(NamedTuple):
    """Tensors that an update rule reads and writes: the slot and the gradient of each shard, by name."""

    slots: Mapping[str, Slot]
    grad: Callable[[str], Tensor]

    def of(self, shards: Sequence[str]) -> tuple[list[Slot], list[Tensor]]:
        return [self.slots[name] for name in shards], [self.grad(name) for name in shards]


class UpdateRule(Protocol):
    @property
    def fused(self) -> bool:
        """True if the device can skip an update (`skip`)."""

    @property
    def loads_in_place(self) -> bool:
        """True if `saved` returns the live tensors. A checkpoint may then be read into them, and `restore` may be
        called with these same tensors."""

    def slot(self, name: str, tensor: Tensor) -> Slot:
        """Allocates the state before the first step, so that memory is known and a checkpoint can be loaded."""

    def step(self, store: Slots, shards: Sequence[str], control: Control) -> None:
        """Updates the tensors with these names."""

    def saved(self, slot: Slot) -> dict[str, Tensor]:
        """State as in a checkpoint: tensors shaped like the weight, or of WHOLE_KINDS."""

    def restore(self, slot: Slot, saved: Mapping[str, Tensor]) -> None:
        """Loads a state that `saved` returned."""


@dataclass(frozen=True)
class LiveState:
    """Implements `saved` and `restore` for rules whose state has the same form in a checkpoint as in memory."""

    loads_in_place = True

    def saved(self, slot: Slot) -> dict[str, Tensor]:
        """Returns the live tensors, not copies."""
        return dict(slot.state)

    def restore(self, slot: Slot, saved: Mapping[str, Tensor]) -> None:
        for kind, tensor in slot.state.items():
            tensor.copy_(saved[kind])


@dataclass(frozen=True)
class Gated:
    """Gradients of a possibly skipped step. `open` is 1, or 0 for a skipped step. A rule that multiplies its rates by
    `open` changes no bit in a skipped step, because the gradients are then 0 and not NaN."""

    grads: list[Tensor]
    open: float | Tensor

    @staticmethod
    def by(skip: Tensor | None, grads: list[Tensor]) -> "Gated":
        if skip is None:
            return Gated(grads, 1.0)
        applied = skip == 0
        return Gated([torch.where(applied, grad, 0.0) for grad in grads], applied.to(grads[0].dtype))
