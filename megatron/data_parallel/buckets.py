"""Buckets: flat gradient buffers, each for many parameters, and the collectives over them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from megatron.distributed import collectives
from megatron.distributed.parallel_state import Axis
from megatron.state.division import Division
from megatron.state.store import Buffer

_ALIGNED = 64
"""Alignment, in elements, of a rank's chunk of a divided bucket, so that each chunk begins at a whole vector."""


@dataclass(eq=False)
class GradientSlot:
    """Storage of one parameter's gradient."""

    name: str
    parameter: nn.Parameter
    axis: Axis
    """Axis over which the gradient is summed and, with ZeRO, divided."""
    replicas: Axis
    """Axis over which these sums are then summed: the ranks with the same share, one in each instance of the
    optimizer."""
    dtype: torch.dtype
    """Dtype in which the gradient is accumulated."""
    shown: bool
    """True if `parameter.grad` is `view` between passes."""
    apart: bool = False
    """True for a parameter with a bucket of its own."""
    view: Tensor | None = None
    """Part of the bucket for this gradient; None if the gradient stays in `parameter.grad`."""
    own: Tensor | None = None
    """Part of `view` that this rank updates: all of it, or this rank's piece if the bucket is divided."""
    bucket: int = -1
    division: Division | None = None
    filled: bool = False
    """True if the view holds a gradient of this step; before that its values are undefined."""

    @property
    def kind(self) -> tuple[object, ...]:
        """Key that is equal for all parameters that may share a bucket."""
        return self.dtype, self.parameter.dtype, self.parameter.device, self.axis.name

    @property
    def fits_its_parameter(self) -> bool:
        """True if the gradient may stay in `parameter.grad`."""
        return self.axis.size * self.replicas.size == 1 and self.dtype == self.parameter.dtype


@dataclass(eq=False, kw_only=True)
class Bucket(Buffer):
    """Gradient buffer that is sent in one message. Parameters are in the model's reverse order: backward fills the
    front first."""

    axis: Axis
    replicas: Axis
    message: Tensor
    """Tensor that is summed: the buffer and, optionally, a last element with the number of ranks that lack a
    gradient."""
    arrived: set[str] = field(default_factory=set)
    launched: bool = False
    pending: collectives.Pending | None = None
    gathering: collectives.Pending | None = None

    @cached_property
    def count(self) -> Tensor | None:
        """Number of ranks that lack one of the bucket's gradients: the last element of the message. None if they are
        not counted."""
        return self.message[-1] if self.message.numel() > self.buffer.numel() else None

    @property
    def lacked(self) -> bool:
        """True if any rank lacked one of the bucket's gradients. Valid after the sum; the same on all ranks."""
        assert self.count is not None
        return self.count.item() != 0

    def start_sum(self, lacks: bool = False) -> None:
        """Starts the sum over the ranks. `lacks`: a gradient did not arrive on this rank, and zeros replace it."""
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

    def whole_of(self, name: str, piece: Tensor) -> Tensor:
        """Assembles a tensor in the parameter's shape from the pieces of all ranks. A collective."""
        parameter, first = self.parameters[name], self.places[name][0]
        whole = piece.new_empty(parameter.numel())
        for rank in range(self.axis.size):
            start, stop = (end - first for end in self.piece(name, rank))
            if rank == self.axis.rank:
                whole[start:stop].copy_(piece)
            if start < stop:
                collectives.broadcast(whole[start:stop], self.axis, rank)
        return whole.view(parameter.shape)


def make_buckets(slots: Iterable[GradientSlot], size: int, divided: bool, counts: bool = False) -> list[Bucket]:
    """Groups the parameters, in the given order, into buckets of one kind. A bucket is full at `size` elements. Buckets
    are ordered by the arrival of their last gradient. `counts`: undivided buckets count the ranks that lack a
    gradient."""
    assert size > 0, f"bucket size {size} is not positive"
    closed: list[list[GradientSlot]] = []
    open_: dict[tuple[object, ...], list[GradientSlot]] = {}
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


def _make_bucket(number: int, members: list[GradientSlot], divided: bool, counts: bool) -> Bucket:
    first, sizes = members[0], [slot.parameter.numel() for slot in members]
    total, axis, ranks = sum(sizes), first.axis, first.axis.size if divided else 1
    share = total if ranks == 1 else -(-total // (ranks * _ALIGNED)) * _ALIGNED
    counter = int(counts and ranks == 1)
    message = torch.zeros(share * ranks + counter, dtype=first.dtype, device=first.parameter.device)
    buffer = message[: share * ranks]
    places = list(pairwise(accumulate(sizes, initial=0)))
    for slot, place in zip(members, places, strict=True):
        part, strides = buffer[slice(*place)], _strides_of_gradient(slot.parameter)
        slot.view = part.view(slot.parameter.shape) if ranks > 1 else part.as_strided(slot.parameter.shape, strides)
        slot.bucket = number
        if ranks > 1:
            slot.division = Division(axis.members, slot.parameter.numel(), share, place[0], row=number)
    bucket = Bucket(
        parameters={slot.name: slot.parameter for slot in members},
        views={slot.name: slot.view for slot in members if slot.view is not None},
        places={slot.name: place for slot, place in zip(members, places, strict=True)},
        buffer=buffer,
        chunk=(0, total) if ranks == 1 else (axis.rank * share, (axis.rank + 1) * share),
        axis=axis,
        replicas=first.replicas,
        message=message,
    )
    for slot in members:
        slot.own = buffer[slice(*bucket.piece(slot.name))] if bucket.divided else slot.view
    if bucket.divided:
        bucket.flatten_weights()
    return bucket


def _strides_of_gradient(parameter: nn.Parameter) -> tuple[int, ...]:
    """Strides that autograd gives this parameter's gradient: the parameter's own (channels_last, say), if they leave no
    gaps. Fused optimizers read parameter and gradient in memory order."""
    return torch.empty_like(parameter, device="meta").stride()
