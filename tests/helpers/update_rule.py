"""Runs a rule's update on slots and gradients outside any store."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron.optimizer.rules import Control, Slot, Slots, UpdateRule


def update(
    rule: UpdateRule,
    slots: Sequence[Slot],
    grads: Sequence[Tensor],
    lr: float,
    decay: float,
    skip: Tensor | None = None,
) -> None:
    by_name = {slot.name: slot for slot in slots}
    gradients = dict(zip(by_name, grads, strict=True))
    rule.step(Slots(by_name, gradients.__getitem__), list(by_name), Control(lr, decay, skip))
