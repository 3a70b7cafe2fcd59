"""Collectives over one axis. An axis of size 1 returns at once and never touches torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from megatron.distributed.operations import Operation
from megatron.distributed.state import Axis

ReduceName = Literal["sum", "max", "min"]
T = TypeVar("T")

# torch 2.13 renamed these and warns of the old names, which older ones alone have.
_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True)
class Pending:
    """A collective under way."""

    work: dist.Work
    axis: Axis
    operation: Operation

    def wait(self) -> None:
        with self.axis.wait(self.operation):
            self.work.wait()


def all_reduce(tensor: torch.Tensor, axis: Axis, op: ReduceName = "sum") -> torch.Tensor:
    """Reduces `tensor` in place over the axis and returns it."""
    if axis.size > 1:
        with axis.during("all_reduce", tuple(tensor.shape)):
            dist.all_reduce(tensor, _REDUCE[op], axis.group)
    return tensor


def start_all_reduce(tensor: torch.Tensor, axis: Axis, op: ReduceName = "sum") -> Pending | None:
    """Starts the same; the result is there after `wait()` on what it returns (None: nothing to wait for)."""
    if axis.size == 1:
        return None
    operation = axis.begin("all_reduce", tuple(tensor.shape))
    return Pending(dist.all_reduce(tensor, _REDUCE[op], axis.group, async_op=True), axis, operation)


def broadcast(tensor: torch.Tensor, axis: Axis, source: int = 0) -> torch.Tensor:
    """Overwrites `tensor` with that of the member at place `source` of the axis, and returns it."""
    if axis.size > 1:
        with axis.during("broadcast", tuple(tensor.shape)):
            dist.broadcast(tensor, axis.ranks[source], axis.group)
    return tensor


def all_gather(tensor: torch.Tensor, axis: Axis) -> list[torch.Tensor]:
    """The tensors of all members, in the order of the axis; they must have one shape."""
    if axis.size == 1:
        return [tensor]
    gathered = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(axis.size)]
    with axis.during("all_gather", tuple(tensor.shape)):
        dist.all_gather(gathered, tensor.contiguous(), axis.group)
    return gathered


def gather_along(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """The members' tensors (of one shape) laid end to end along `dim`."""
    result, pending = start_gather_along(tensor, axis, dim)
    return result() if pending is None else _after(pending, result)


def start_gather_along(tensor: torch.Tensor, axis: Axis, dim: int) -> tuple[Callable[[], torch.Tensor], Pending | None]:
    """Starts the same; after `wait()` on the second, the first returns the result."""
    if axis.size == 1:
        return lambda: tensor, None
    flat = tensor.new_empty((axis.size * tensor.shape[0], *tensor.shape[1:]))
    operation = axis.begin("all_gather", tuple(tensor.shape))
    pending = Pending(_gather_flat(flat, tensor.contiguous(), axis.group, async_op=True), axis, operation)
    if dim == 0 or tensor.shape[:dim].numel() == 1:
        shape = list(tensor.shape)
        shape[dim] *= axis.size
        return lambda: flat.view(shape), pending
    return lambda: torch.cat(flat.chunk(axis.size), dim), pending


def scatter_sum(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """The sum over the members of this member's piece along `dim` (reduce-scatter); `dim` must divide by the size."""
    result, pending = start_scatter_sum(tensor, axis, dim)
    return result if pending is None else _after(pending, lambda: result)


def start_scatter_sum(tensor: torch.Tensor, axis: Axis, dim: int) -> tuple[torch.Tensor, Pending | None]:
    """Starts the same; the result is there after `wait()`."""
    if axis.size == 1:
        return tensor, None
    assert tensor.shape[dim] % axis.size == 0, f"{tuple(tensor.shape)} along {dim} over {axis.size} ranks"
    if tensor.shape[:dim].numel() != 1:  # its pieces must lie one after another
        tensor = torch.stack(tensor.chunk(axis.size, dim))
        result = torch.empty_like(tensor[0])
    else:
        shape = list(tensor.shape)
        shape[dim] //= axis.size
        result = tensor.new_empty(shape)
    operation = axis.begin("reduce_scatter", tuple(tensor.shape))
    work = _scatter_flat(result.view(-1), tensor.contiguous().view(-1), group=axis.group, async_op=True)
    return result, Pending(work, axis, operation)


def _after(pending: Pending, result: Callable[[], torch.Tensor]) -> torch.Tensor:
    pending.wait()
    return result()


def all_to_all(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """tensor [members, ...]: entry i goes to member i; the result's entry i is what member i sent here."""
    if axis.size == 1:
        return tensor
    assert tensor.shape[0] == axis.size, f"{tuple(tensor.shape)} for {axis.size} ranks"
    received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    with axis.during("all_to_all"):
        dist.all_to_all_single(received, tensor.contiguous(), group=axis.group)
    return received


def exchange(rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> torch.Tensor:
    """Rows laid out by the member they go to, `send` of them; the result by the member they come from, `receive`."""
    if axis.size == 1:
        return rows
    received = rows.new_empty((sum(receive), *rows.shape[1:]))
    with axis.during("all_to_all"):
        dist.all_to_all_single(received, rows.contiguous(), list(receive), list(send), axis.group)
    return received


@dataclass(frozen=True)
class Shift:
    """A tensor on its way round."""

    sent: torch.Tensor  # kept until it has left
    received: torch.Tensor
    pending: list[Pending]

    def wait(self) -> torch.Tensor:
        for work in self.pending:
            work.wait()
        return self.received


def start_shift(tensor: torch.Tensor, axis: Axis) -> Shift:
    """Sends `tensor` to the next member, round, and receives that of the member before, of the same shape. All members
    start the same shifts in the same order."""
    if axis.size == 1:
        return Shift(tensor, tensor, [])
    tensor = tensor.contiguous()
    received = torch.empty_like(tensor)
    following, previous = (axis.ranks[(axis.rank + step) % axis.size] for step in (1, -1))
    sending = dist.P2POp(dist.isend, tensor, following, axis.group)
    receiving = dist.P2POp(dist.irecv, received, previous, axis.group)
    operation = axis.begin("shift", tuple(tensor.shape))
    works = dist.batch_isend_irecv([sending, receiving])
    return Shift(tensor, received, [Pending(work, axis, operation) for work in works])


def own_piece(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """This member's piece of a tensor that all have: no communication."""
    if axis.size == 1:
        return tensor
    assert tensor.shape[dim] % axis.size == 0, f"{tuple(tensor.shape)} along {dim} over {axis.size} ranks"
    return tensor.chunk(axis.size, dim)[axis.rank]


def all_gather_object(value: T, axis: Axis) -> list[T]:
    """Small Python values of all members, in the order of the axis."""
    if axis.size == 1:
        return [value]
    gathered: list[Any] = [None] * axis.size
    with axis.during("all_gather_object"):
        dist.all_gather_object(gathered, value, axis.group)
    return gathered


def gather_object(value: T, axis: Axis, target: int = 0) -> list[T] | None:
    """Small Python values of all members, on the member at place `target` only; None on the others."""
    if axis.size == 1:
        return [value]
    gathered: list[Any] | None = [None] * axis.size if axis.rank == target else None
    with axis.during("gather_object"):
        dist.gather_object(value, gathered, axis.ranks[target], axis.group)
    return gathered


def broadcast_object(value: T | None, axis: Axis, source: int = 0) -> T:
    """The Python value of the member at place `source`, on every member."""
    box = [value]
    if axis.size > 1:
        with axis.during("broadcast_object"):
            dist.broadcast_object_list(box, axis.ranks[source], axis.group)
    return box[0]  # type: ignore[return-value]


def barrier(axis: Axis) -> None:
    """Returns when every member has called it."""
    if axis.size > 1:
        with axis.during("barrier"):
            dist.barrier(axis.group)
