"""What an optimizer is given: gradients, and the pieces of the parameters that this rank updates.

A piece is a range of a parameter's elements in memory's order. Without ZeRO it is the whole parameter, on every rank;
with it the data-parallel ranks divide the elements, and a rank keeps masters and moments of its own pieces alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, dtype, nn

from megatron.distributed.state import Axis
from megatron.state.division import Division, Range
from megatron.utils.dtype import HALF


@dataclass(frozen=True)
class FlatPieces:
    """Pieces that lie one after the other in flat tensors: they are updated in one pass over memory."""

    names: tuple[str, ...]
    ends: tuple[int, ...]
    """Where each piece ends; it begins where the one before it ends."""
    grads: Tensor
    weights: Tensor
    """The model's own; in its type, or its fp32 masters."""


class Gradients(Protocol):
    @property
    def device(self) -> torch.device:
        """Where the model computes, and what its ranks send each other is. The pieces may be in host memory."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """Every trainable parameter once, in the order of the model; a tied one under its first name."""
        ...

    @property
    def flat(self) -> bool:
        """Whether `flat_buffers` has all of them."""
        ...

    def parameter(self, name: str) -> nn.Parameter:
        """As the model has it: its shape says what it is, and is not always that of its piece."""
        ...

    def weight(self, name: str) -> Tensor:
        """This rank's piece: in the parameter's own shape if it is all of it, else of one dimension, maybe empty."""
        ...

    def grad(self, name: str) -> Tensor:
        """The piece's gradient, in its shape. Writing to it changes the gradient."""
        ...

    def grad_dtype(self, name: str) -> dtype:
        """The type in which gradients are added up."""
        ...

    def grads(self) -> Iterator[tuple[str, Tensor]]:
        """All gradients by name."""
        ...

    def runs(self) -> Iterator[tuple[str, Tensor]]:
        """All gradients in as few tensors as they lie in, each with the name of its first parameter."""
        ...

    def flat_buffers(self) -> Iterator[FlatPieces]:
        """All pieces in flat buffers, which the model computes with from here on."""
        ...

    def multiply(self, factor: Tensor | float) -> None:
        """Multiplies every gradient by a single number."""
        ...

    def held(self, name: str) -> Range:
        """Which elements of the parameter the piece holds."""
        ...

    def piece_of(self, name: str, whole: Tensor) -> Tensor:
        """The view of a tensor of the parameter's shape that is this rank's piece, shaped as `weight` is."""
        ...

    def whole_of(self, name: str, piece: Tensor) -> Tensor:
        """The whole tensor of all ranks' pieces, in the parameter's shape: the piece itself where that is whole. A
        collective of `divided_over`: its ranks ask for the same tensors in the same order."""
        ...

    def divided_over(self, name: str) -> Axis:
        """The ranks that hold the pieces of a parameter; of size 1 where every rank's piece is whole."""
        ...

    def division(self, name: str) -> Division | None:
        """How the ranks divide the parameter; None where every rank's piece is whole."""
        ...

    def replicas(self, name: str) -> Axis:
        """The ranks that hold the same parameter, whole or divided."""
        ...

    def publish(self) -> None:
        """After an update of the pieces: begins to give all ranks the whole weights."""
        ...

    def wait_for_weights(self) -> None:
        """Until they are there. A forward pass of the model waits by itself."""
        ...

    def zero(self) -> None:
        """Begins a step."""
        ...

    def arm(self) -> None:
        """Announces the last backward of the step."""
        ...

    def reduce(self) -> None:
        """Sums over the ranks. Afterwards `grad` is the sum."""
        ...

    def close(self) -> None:
        """Leaves the model as a plain one."""
        ...


def piece_alone(grads: Gradients, name: str) -> FlatPieces:
    """One that lies by itself, as those of gathered weights do."""
    weight = grads.weight(name)
    return FlatPieces((name,), (weight.numel(),), grads.grad(name).view(-1), weight.view(-1))


def are_masters(grads: Gradients, flat: FlatPieces) -> bool:
    """Whether these weights are the fp32 masters of a model that computes in half precision."""
    halves = {grads.parameter(name).dtype in HALF for name in flat.names}
    assert len(halves) == 1, "weights of a buffer have one type"
    return halves.pop() and flat.weights.dtype not in HALF
