"""Store: the weights, gradients and optimizer tensors that a rank updates, by name and as flat tensors.

A part is a range of a parameter's elements in memory order. Without ZeRO it is the whole parameter, on every rank. With
ZeRO the data-parallel ranks divide the elements, and each rank has masters and moments of its own parts only.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor, nn

from megatron.state.division import Division, Range, common
from megatron.utils.dtype import HALF


@dataclass(frozen=True)
class FlatRun:
    """Parts that are contiguous in flat tensors, so that one pass over memory updates them."""

    names: tuple[str, ...]
    ends: tuple[int, ...]
    """End of each part. A part begins at the end of the part before it."""
    grads: Tensor
    weights: Tensor
    """The model's weights in its dtype, or their fp32 masters."""
    kinds: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of optimizer state by kind, such as exp_avg; each is as long as `weights`."""

    def places(self) -> Iterator[tuple[str, slice]]:
        """Yields the name of each part and its slice of the flat tensors."""
        return zip(self.names, map(slice, (0, *self.ends), self.ends), strict=False)


@dataclass(eq=False, kw_only=True)
class Buffer:
    """Gradients of several parameters in one flat tensor. `weights`, if not None: the weights in the same order."""

    parameters: Mapping[str, nn.Parameter]
    views: Mapping[str, Tensor]
    """Each gradient in the shape of its parameter."""
    places: Mapping[str, Range]
    """The elements of the buffer that belong to each parameter."""
    buffer: Tensor
    chunk: Range
    """Range of the buffer that this rank updates: all, or its share of a divided buffer. A share may end with
    padding."""
    weights: Tensor | None = None

    @property
    def divided(self) -> bool:
        return self.chunk != (0, self.buffer.numel())

    def piece(self, name: str, rank: int | None = None) -> Range:
        """The part of a parameter that a rank (default: this rank) updates, as a range of the buffer. If there is
        none, the range is empty, at the end of the parameter."""
        place, share = self.places[name], self.chunk[1] - self.chunk[0]
        first = self.chunk[0] if rank is None else rank * share
        start, stop = common(place, (first, first + share))
        return (start, stop) if start < stop else (place[1], place[1])

    @cached_property
    def held(self) -> Range:
        """Range that this rank updates, without the padding."""
        return self.chunk[0], self.chunk[0] + sum(stop - start for start, stop in map(self.piece, self.places))

    @cached_property
    def own(self) -> Tensor:
        """Gradients of the elements that this rank updates."""
        return self.buffer[slice(*self.held)]

    @cached_property
    def run(self) -> FlatRun:
        sizes = (stop - start for start, stop in map(self.piece, self.places))
        weights = self.flatten_weights()[slice(*self.held)]
        return FlatRun(tuple(self.places), tuple(accumulate(sizes)), self.own, weights)

    def flatten_weights(self) -> Tensor:
        """Returns the flat tensor of the weights. The first call makes it, and makes the parameters views of it."""
        if self.weights is None:
            dtype = next(iter(self.parameters.values())).dtype
            self.weights = torch.zeros(self.buffer.numel(), dtype=dtype, device=self.buffer.device)
            for name, parameter in self.parameters.items():
                part = self.weights[slice(*self.places[name])]
                part = part.as_strided(self.views[name].shape, self.views[name].stride())
                parameter.data = part.copy_(parameter.detach())
        return self.weights

    def name_at(self, offset: int) -> str:
        """The name of the parameter that the element at `offset` belongs to."""
        return next(name for name, (start, stop) in self.places.items() if start <= offset < stop)


class Store(ABC):
    """The weights and gradients that one rank updates."""

    names: tuple[str, ...]
    """Every trainable parameter once, in the order of the model; a tied one under its first name."""
    device: torch.device
    """Device on which the model computes and ranks communicate. The parts may be in host memory."""
    divisions: Mapping[str, Division | None]
    """Division of each parameter among the ranks; None where every rank's part is whole."""
    grad_dtypes: Mapping[str, torch.dtype]
    """Dtype in which the gradients of each parameter are accumulated."""
    flat: bool
    """True if `runs` returns all parts, and the addresses of their gradients never change."""

    @abstractmethod
    def parameter(self, name: str) -> nn.Parameter:
        """The module's parameter, full shape; this rank's part may have another shape."""

    @abstractmethod
    def weight(self, name: str) -> Tensor:
        """This rank's part of the weight: in the parameter's shape if whole, else one-dimensional and maybe empty."""

    @abstractmethod
    def grad(self, name: str) -> Tensor:
        """Gradient of this rank's part, in the shape of `weight`. Writing to the tensor changes the stored gradient."""

    @abstractmethod
    def runs(self) -> list[FlatRun]:
        """Returns all parts in as few flat tensors as possible. Afterwards the model's parameters
        use the memory of these tensors."""

    @abstractmethod
    def multiply(self, factor: Tensor | float) -> None:
        """Multiplies every gradient by a single number."""

    def grads(self) -> Iterator[tuple[str, Tensor]]:
        """All gradients by name."""
        return ((name, self.grad(name)) for name in self.names)

    def flat_grads(self) -> Iterator[tuple[str, Tensor]]:
        """All gradients in as few tensors as possible, each with the name of its first parameter."""
        return self.grads()

    def held(self, name: str) -> Range:
        """Range of the parameter's elements in this rank's part."""
        division = self.divisions[name]
        return (0, self.parameter(name).numel()) if division is None else division.held

    def part_of(self, name: str, whole: Tensor) -> Tensor:
        """Returns this rank's part of `whole`, a tensor of the parameter's shape. The part is a view in the shape of
        `weight`."""
        division = self.divisions[name]
        return whole if division is None else whole.view(-1)[slice(*division.held)]


def run_alone(store: Store, name: str) -> FlatRun:
    """Makes a `FlatRun` of a single parameter, such as a gathered weight."""
    weight = store.weight(name)
    return FlatRun((name,), (weight.numel(),), store.grad(name).view(-1), weight.view(-1))


def are_masters(store: Store, run: FlatRun) -> bool:
    """True if the run's weights are fp32 masters of half-precision parameters."""
    halves = {store.parameter(name).dtype in HALF for name in run.names}
    assert len(halves) == 1, "all weights of a flat run must have one dtype"
    return halves.pop() and run.weights.dtype not in HALF
