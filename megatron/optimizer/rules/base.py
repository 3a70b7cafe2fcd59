"""What every update rule offers, and how one leaves an update out without asking the host."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

ROWS, COLUMNS = "exp_avg_sq_row", "exp_avg_sq_col"
WHOLE_KINDS = (ROWS, COLUMNS)
"""Kinds of state with a shape of their own: every rank has those of the whole parameter, whatever it holds of it."""


@dataclass
class Slot:
    """One tensor that is updated, and its optimizer state."""

    name: str
    """The name of the parameter."""
    tensor: Tensor
    state: dict[str, Tensor]
    """Kind of state -> tensor. A checkpoint has the same kinds, unless the rule stores its state there in another
    form."""
    step: Tensor
    """The number of updates, on the device where the rule needs it there."""


class Control(NamedTuple):
    """The numbers of one update."""

    lr: float
    weight_decay: float
    skip: Tensor | None = None
    """A number on the device; unless it is 0 the update is not made. For fused rules."""


class Slots(NamedTuple):
    """The tensors of a store as rules see them: a slot and a gradient by name."""

    slots: Mapping[str, Slot]
    grad: Callable[[str], Tensor]

    def of(self, shards: Sequence[str]) -> tuple[list[Slot], list[Tensor]]:
        return [self.slots[name] for name in shards], [self.grad(name) for name in shards]


class UpdateRule(Protocol):
    @property
    def fused(self) -> bool:
        """Whether the device can decide that an update is not made (`skip`)."""

    @property
    def loads_in_place(self) -> bool:
        """Whether `saved` gives the live tensors, so that a checkpoint may be read into them: what `restore` is given
        may be the same ones."""

    def slot(self, name: str, tensor: Tensor) -> Slot:
        """The state before the first step. Allocated now, so that memory is known and a checkpoint can be loaded."""

    def step(self, store: Slots, shards: Sequence[str], control: Control) -> None:
        """Updates the tensors with these names."""

    def saved(self, slot: Slot) -> dict[str, Tensor]:
        """The state as a checkpoint holds it: tensors shaped like the weight, or of WHOLE_KINDS."""

    def restore(self, slot: Slot, saved: Mapping[str, Tensor]) -> None:
        """The reverse of `saved`."""


@dataclass(frozen=True)
class LiveState:
    """`saved` and `restore` of rules whose state has the same form in a checkpoint as in memory."""

    loads_in_place = True

    def saved(self, slot: Slot) -> dict[str, Tensor]:
        """The live tensors, not copies."""
        return dict(slot.state)

    def restore(self, slot: Slot, saved: Mapping[str, Tensor]) -> None:
        for kind, tensor in slot.state.items():
            tensor.copy_(saved[kind])


@dataclass(frozen=True)
class Gated:
    """The gradients of a step that may have to be left out. `open` is 1, or 0 where the step is left out: a rule that
    multiplies its rates by it then changes no bit, because the gradients are 0 and not NaN."""

    grads: list[Tensor]
    open: float | Tensor

    @staticmethod
    def by(skip: Tensor | None, grads: list[Tensor]) -> "Gated":
        if skip is None:
            return Gated(grads, 1.0)
        applied = skip == 0
        return Gated([torch.where(applied, grad, 0.0) for grad in grads], applied.to(grads[0].dtype))
