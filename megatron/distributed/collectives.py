"""Collectives over one axis. An axis of size 1 returns at once and never touches torch.distributed."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from megatron.distributed.state import Axis

ReduceName = Literal["sum", "max", "min"]
Pending = dist.Work
T = TypeVar("T")

_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_reduce(tensor: torch.Tensor, axis: Axis, op: ReduceName = "sum") -> torch.Tensor:
    """Reduces `tensor` in place over the axis and returns it."""
    if axis.size > 1:
        dist.all_reduce(tensor, _REDUCE[op], axis.group)
    return tensor


def start_all_reduce(tensor: torch.Tensor, axis: Axis, op: ReduceName = "sum") -> Pending | None:
    """Starts the same; the result is there after `wait()` on what it returns (None: nothing to wait for)."""
    if axis.size == 1:
        return None
    return dist.all_reduce(tensor, _REDUCE[op], axis.group, async_op=True)


def broadcast(tensor: torch.Tensor, axis: Axis, source: int = 0) -> torch.Tensor:
    """Overwrites `tensor` with that of the member at place `source` of the axis, and returns it."""
    if axis.size > 1:
        dist.broadcast(tensor, axis.ranks[source], axis.group)
    return tensor


def all_gather(tensor: torch.Tensor, axis: Axis) -> list[torch.Tensor]:
    """The tensors of all members, in the order of the axis; they must have one shape."""
    if axis.size == 1:
        return [tensor]
    gathered = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(axis.size)]
    dist.all_gather(gathered, tensor.contiguous(), axis.group)
    return gathered


def all_gather_object(value: T, axis: Axis) -> list[T]:
    """Small Python values of all members, in the order of the axis."""
    if axis.size == 1:
        return [value]
    gathered: list[Any] = [None] * axis.size
    dist.all_gather_object(gathered, value, axis.group)
    return gathered


def gather_object(value: T, axis: Axis, target: int = 0) -> list[T] | None:
    """Small Python values of all members, on the member at place `target` only; None on the others."""
    if axis.size == 1:
        return [value]
    gathered: list[Any] | None = [None] * axis.size if axis.rank == target else None
    dist.gather_object(value, gathered, axis.ranks[target], axis.group)
    return gathered


def broadcast_object(value: T | None, axis: Axis, source: int = 0) -> T:
    """The Python value of the member at place `source`, on every member."""
    box = [value]
    if axis.size > 1:
        dist.broadcast_object_list(box, axis.ranks[source], axis.group)
    return box[0]  # type: ignore[return-value]


def barrier(axis: Axis) -> None:
    """Returns when every member has called it."""
    if axis.size > 1:
        dist.barrier(axis.group)
