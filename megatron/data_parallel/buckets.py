"""Flat buffers of gradients, each of many parameters: what is sent in one message."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from megatron.data_parallel.gradients import FlatPieces
from megatron.data_parallel.withheld import WithheldGrad
from megatron.distributed import collectives
from megatron.distributed.state import Axis
from megatron.state.division import Range, common

_ALIGNED = 64
"""A rank's chunk of a divided bucket is a multiple of so many elements: whole vectors, wherever it begins."""


@dataclass(eq=False)
class Slot:
    """The place of one parameter's gradient."""

    name: str
    parameter: nn.Parameter
    axis: Axis
    """The axis that its gradient is summed over, and with ZeRO divided over."""
    replicas: Axis
    """The axis that the sum is summed over in turn: the ranks that have the same share, one in each instance."""
    dtype: torch.dtype
    """The type in which its gradients are added up."""
    shown: bool
    """Whether `parameter.grad` is the view between passes."""
    apart: bool = False
    """Whether it has a bucket of its own."""
    view: Tensor | None = None
    """Its part of the bucket; None where the gradient stays in `parameter.grad`."""
    own: Tensor | None = None
    """What this rank updates of it: all, or a piece of a divided bucket. Made once, not in every step."""
    bucket: int = -1
    place: Range = (0, 0)
    """The elements of the bucket's buffer that belong to it."""
    stand_in: WithheldGrad | None = None
    """What `parameter.grad` is after a pass, unless it is the view."""
    filled: bool = False
    """Whether the view holds a gradient of this step (before that it may hold anything)."""

    @property
    def kind(self) -> tuple[object, ...]:
        """Parameters of one kind may share a bucket."""
        return self.dtype, self.parameter.dtype, self.parameter.device, self.axis.name

    @property
    def fits_its_parameter(self) -> bool:
        """Whether the gradient may stay in `parameter.grad`."""
        return self.axis.size * self.replicas.size == 1 and self.dtype == self.parameter.dtype


@dataclass(eq=False)
class Bucket:
    """A flat buffer with the gradients of several parameters, in reverse order of the model: backward fills it from the
    front."""

    slots: list[Slot]
    buffer: Tensor
    message: Tensor
    """The tensor that is summed: the buffer and, if the bucket counts them, one more element: the number of ranks that
    lack one of its gradients."""
    axis: Axis
    replicas: Axis
    chunk: Range
    """What this rank updates: its share of a divided bucket, whose end may be padding; else all."""
    weights: Tensor | None = None
    """The parameters in one flat tensor, in the same order: of divided buckets, and where it was asked for."""
    arrived: set[str] = field(default_factory=set)
    launched: bool = False
    pending: collectives.Pending | None = None
    gathering: collectives.Pending | None = None

    @property
    def divided(self) -> bool:
        return self.chunk != (0, self.buffer.numel())

    @property
    def complete(self) -> bool:
        return len(self.arrived) == len(self.slots)

    @cached_property
    def count(self) -> Tensor | None:
        """The number of ranks that lack one of its gradients: the last element of the message. None if that is not
        counted."""
        return self.message[-1] if self.message.numel() > self.buffer.numel() else None

    @property
    def lacked(self) -> bool:
        """After the sum: whether any rank lacked one of its gradients. The same on all ranks."""
        assert self.count is not None
        return self.count.item() != 0

    def start_sum(self, lacks: bool = False) -> None:
        """Starts the sum over the ranks. `lacks`: one of the gradients did not arrive on this rank, and zeros stand for
        it."""
        self.launched = True
        if self.count is not None:
            self.count.fill_(lacks)
        if self.divided:
            self.pending = collectives.start_scatter_sum_in_place(self.message, self.axis)
        else:
            self.pending = collectives.start_all_reduce(self.message, self.axis)

    def start_sum_of_instances(self) -> None:
        """Waits for the sum within this rank's instance of the optimizer, then starts summing this rank's chunk over
        the instances."""
        if self.replicas.size > 1:
            self.finish_sum()
            self.pending = collectives.start_all_reduce(self.buffer[slice(*self.chunk)], self.replicas)

    def finish_sum(self) -> None:
        if self.pending is not None:
            self.pending.wait()
            self.pending = None

    def start_gather(self) -> None:
        """Starts the all-gather of the weights, after every rank has updated its chunk."""
        assert self.divided and self.weights is not None
        self.gathering = collectives.start_gather_in_place(self.weights, self.axis)

    def finish_gather(self) -> None:
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def flatten_weights(self) -> Tensor:
        """Makes the parameters views of one flat tensor, if they are not yet, and returns it."""
        if self.weights is None:
            device, dtype = self.buffer.device, self.slots[0].parameter.dtype
            self.weights = torch.zeros(self.buffer.numel(), dtype=dtype, device=device)
            for slot in self.slots:
                assert slot.view is not None
                part = self.weights[slice(*slot.place)].as_strided(slot.view.shape, slot.view.stride())
                slot.parameter.data = part.copy_(slot.parameter.detach())
        return self.weights

    def piece(self, slot: Slot, rank: int | None = None) -> Range:
        """The part of a parameter that a rank (default: this one) updates, as a range of the buffer. An empty range is
        at the end of the parameter."""
        share = self.chunk[1] - self.chunk[0]
        first = self.chunk[0] if rank is None else rank * share
        start, stop = common(slot.place, (first, first + share))
        return (start, stop) if start < stop else (slot.place[1], slot.place[1])

    def name_at(self, offset: int) -> str:
        """The name of the parameter that the element at `offset` belongs to."""
        return next(slot.name for slot in self.slots if slot.place[0] <= offset < slot.place[1])

    @cached_property
    def held(self) -> Range:
        """What this rank updates, without the padding."""
        return self.chunk[0], self.chunk[0] + sum(stop - start for start, stop in map(self.piece, self.slots))

    @cached_property
    def own(self) -> Tensor:
        """The gradients of what this rank updates."""
        return self.buffer[slice(*self.held)]

    def flat_pieces(self) -> FlatPieces:
        sizes = (stop - start for start, stop in map(self.piece, self.slots))
        names, ends = tuple(slot.name for slot in self.slots), tuple(itertools.accumulate(sizes))
        return FlatPieces(names, ends, self.own, self.flatten_weights()[slice(*self.held)])

    def whole_of(self, slot: Slot, piece: Tensor) -> Tensor:
        """Assembles a tensor in the parameter's shape from the pieces of all ranks. A collective."""
        whole = piece.new_empty(slot.parameter.numel())
        for rank in range(self.axis.size):
            start, stop = (end - slot.place[0] for end in self.piece(slot, rank))
            if rank == self.axis.rank:
                whole[start:stop].copy_(piece)
            if start < stop:
                collectives.broadcast(whole[start:stop], self.axis, rank)
        return whole.view(slot.parameter.shape)


def make_buckets(slots: Iterable[Slot], size: int, divided: bool, counts: bool = False) -> list[Bucket]:
    """Groups the parameters, in the given order, into buckets of one kind and at least `size` elements. Buckets are in
    the order in which the last of their gradients arrives. `counts`: buckets that are not divided count the ranks that
    lack a gradient."""
    assert size > 0, f"bucket size {size}"
    closed: list[list[Slot]] = []
    open_: dict[tuple[object, ...], list[Slot]] = {}
    order: dict[str, int] = {}
    for slot in slots:
        order[slot.name] = len(order)
        if slot.apart:
            closed.append([slot])
            continue
        members = open_.setdefault(slot.kind, [])
        members.append(slot)
        if sum(member.parameter.numel() for member in members) >= size:
            closed.append(open_.pop(slot.kind))
    closed += open_.values()
    closed.sort(key=lambda members: order[members[-1].name])
    return [_make_bucket(number, members, divided, counts) for number, members in enumerate(closed)]


def _make_bucket(number: int, members: list[Slot], divided: bool, counts: bool) -> Bucket:
    first, sizes = members[0], [slot.parameter.numel() for slot in members]
    total, ranks = sum(sizes), first.axis.size if divided else 1
    share = total if ranks == 1 else -(-total // (ranks * _ALIGNED)) * _ALIGNED
    counter = int(counts and ranks == 1)
    message = torch.zeros(share * ranks + counter, dtype=first.dtype, device=first.parameter.device)
    buffer = message[: share * ranks]
    for slot, place in zip(members, itertools.pairwise(itertools.accumulate(sizes, initial=0)), strict=True):
        part, strides = buffer[slice(*place)], _strides_of_gradient(slot.parameter)
        slot.view = part.view(slot.parameter.shape) if ranks > 1 else part.as_strided(slot.parameter.shape, strides)
        slot.bucket, slot.place = number, place
    chunk = (0, total) if ranks == 1 else (first.axis.rank * share, (first.axis.rank + 1) * share)
    bucket = Bucket(members, buffer, message, first.axis, first.replicas, chunk)
    for slot in members:
        slot.own = buffer[slice(*bucket.piece(slot))] if bucket.divided else slot.view
    if bucket.divided:
        bucket.flatten_weights()
    return bucket


def _strides_of_gradient(parameter: nn.Parameter) -> tuple[int, ...]:
    """As autograd makes gradients: the parameter's, such as those of channels_last, where they leave no gaps. Fused
    optimizers read both by their place in memory."""
    return torch.empty_like(parameter, device="meta").stride()
