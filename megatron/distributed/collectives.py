"""Collectives over one axis. On an axis of size 1 they return at once, without torch.distributed."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron.distributed.parallel_state import Axis

ReduceName = Literal["sum", "max", "min"]

# torch 2.13 renamed these and warns about the old names; older versions have only the old ones.
_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_PART = 1 << 20
"""Number of elements per message between two ranks with gloo: one part is added while the next arrives."""
_SUM = dist.AllreduceOptions()  # an asynchronous sum
_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True)
class Pending:
    """Collective in flight; on an axis of size 1 the result is available at once."""

    result: Callable[[], torch.Tensor]
    works: Sequence[dist.Work] = ()
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    """Makes a context for each wait, which the axis's log records."""
    sent: torch.Tensor | None = None
    """Tensor that must not be freed until it is sent."""

    def wait(self) -> torch.Tensor:
        for work in self.works:
            with self.waiting():
                work.wait()
        return self.result()


def all_reduce(tensor: torch.Tensor, axis: Axis, op: ReduceName = "sum") -> torch.Tensor:
    """Reduces `tensor` in place over the axis and returns it."""
    if axis.size > 1:
        with axis.during("all_reduce", tuple(tensor.shape)):
            dist.all_reduce(tensor, _REDUCE[op], axis.group)
    return tensor


def start_all_reduce(tensor: torch.Tensor, axis: Axis) -> Pending:
    """Starts summing `tensor` in place."""
    if axis.size == 1:
        return Pending(lambda: tensor)
    operation = axis.begin("all_reduce", tuple(tensor.shape))
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    # Calls the group's own method: the lookups in `dist.all_reduce` take a tenth of a small message's time.
    work = axis.group.allreduce([real], _SUM)
    return Pending(lambda: tensor, [work], partial(axis.wait, operation))


def broadcast(tensor: torch.Tensor, axis: Axis, source: int = 0) -> torch.Tensor:
    """Overwrites `tensor` with the tensor of axis rank `source`, and returns it."""
    if axis.size > 1:
        with axis.during("broadcast", tuple(tensor.shape)):
            dist.broadcast(as_bytes(tensor), axis.ranks[source], axis.group)
    return tensor


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Views a contiguous tensor's memory as one flat tensor of bytes, because backends lack dtypes such as int16,
    uint32 and float8."""
    return tensor.detach().view(-1).view(torch.uint8)


def start_broadcast(tensor: torch.Tensor, axis: Axis, source: int) -> Pending:
    if axis.size == 1:
        return Pending(lambda: tensor)
    operation = axis.begin("broadcast", tuple(tensor.shape))
    work = dist.broadcast(as_bytes(tensor), axis.ranks[source], axis.group, async_op=True)
    return Pending(lambda: tensor, [work], partial(axis.wait, operation))


def start_reduce(tensor: torch.Tensor, axis: Axis, target: int) -> Pending:
    """Starts summing `tensor` into the tensor of axis rank `target`; other ranks' tensors are undefined afterwards."""
    if axis.size == 1:
        return Pending(lambda: tensor)
    operation = axis.begin("reduce", tuple(tensor.shape))
    work = dist.reduce(tensor, axis.ranks[target], dist.ReduceOp.SUM, axis.group, async_op=True)
    return Pending(lambda: tensor, [work], partial(axis.wait, operation))


def all_gather(tensor: torch.Tensor, axis: Axis) -> list[torch.Tensor]:
    """Returns the tensors of all members in axis order; they must have the same shape."""
    if axis.size == 1:
        return [tensor]
    gathered = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(axis.size)]
    with axis.during("all_gather", tuple(tensor.shape)):
        dist.all_gather(gathered, tensor.contiguous(), axis.group)
    return gathered


def gather_along(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Concatenates the members' tensors, of equal shape, along `dim`."""
    return start_gather_along(tensor, axis, dim).wait()


def start_gather_along(tensor: torch.Tensor, axis: Axis, dim: int) -> Pending:
    if axis.size == 1:
        return Pending(lambda: tensor)
    tensor = tensor.contiguous()
    flat = tensor.new_empty((axis.size * tensor.shape[0], *tensor.shape[1:]))
    operation = axis.begin("all_gather", tuple(tensor.shape))
    work = _gather_flat(flat, tensor, axis.group, async_op=True)
    shape = list(tensor.shape)
    shape[dim] *= axis.size
    adjacent = tensor.shape[:dim].numel() == 1
    return Pending(
        lambda: flat.view(shape) if adjacent else torch.cat(flat.chunk(axis.size), dim),
        [work],
        partial(axis.wait, operation),
        tensor,
    )


def scatter_sum(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Reduce-scatters: returns this member's piece along `dim` of the sum. The size of `dim` must be divisible by the
    axis size."""
    return start_scatter_sum(tensor, axis, dim).wait()


def start_scatter_sum(tensor: torch.Tensor, axis: Axis, dim: int) -> Pending:
    if axis.size == 1:
        return Pending(lambda: tensor)
    assert tensor.shape[dim] % axis.size == 0, (
        f"{tuple(tensor.shape)} cannot be divided along dimension {dim} over {axis.size} ranks"
    )
    if tensor.shape[:dim].numel() != 1:  # the pieces must be contiguous
        tensor = torch.stack(tensor.chunk(axis.size, dim))
        result = torch.empty_like(tensor[0])
    else:
        shape = list(tensor.shape)
        shape[dim] //= axis.size
        result = tensor.new_empty(shape)
    tensor = tensor.contiguous()
    operation = axis.begin("reduce_scatter", tuple(tensor.shape))
    work = _scatter_flat(result.view(-1), tensor.view(-1), group=axis.group, async_op=True)
    return Pending(lambda: result, [work], partial(axis.wait, operation), tensor)


def start_scatter_sum_in_place(flat: torch.Tensor, axis: Axis) -> Pending:
    """Starts an in-place reduce-scatter of a flat tensor. This member's chunk becomes the sum over all members; the
    other chunks are undefined afterwards."""
    if axis.size == 1:
        return Pending(lambda: flat)
    own, *others = _chunks(flat, axis)
    operation = axis.begin("reduce_scatter", tuple(flat.shape))
    if not _peer_to_peer(axis):
        work = _scatter_flat(own, flat, group=axis.group, async_op=True)
        return Pending(lambda: own, [work], partial(axis.wait, operation), flat)
    received = torch.empty_like(flat[own.numel() :]).chunk(len(others))
    sends, arrivals = _exchange(others, received, axis)

    def summed() -> torch.Tensor:
        """Adds each part while the next parts arrive."""
        for chunk, works in zip(received, arrivals, strict=True):
            for work, into, part in zip(works, own.split(_PART), chunk.split(_PART), strict=True):
                with axis.wait(operation):
                    work.wait()
                into.add_(part)
        for work in sends:
            work.wait()
        return own

    return Pending(summed, sent=flat)


def start_gather_in_place(flat: torch.Tensor, axis: Axis) -> Pending:
    """Starts an in-place all-gather of a flat tensor, in which this member has set its own chunk."""
    if axis.size == 1:
        return Pending(lambda: flat)
    own, *others = _chunks(flat, axis)
    operation = axis.begin("all_gather", tuple(own.shape))
    if _peer_to_peer(axis):
        sends, arrivals = _exchange([own] * len(others), others, axis)
        works = [*sends, *(work for parts in arrivals for work in parts)]
    else:
        works = [_gather_flat(flat, own, axis.group, async_op=True)]
    return Pending(lambda: flat, works, partial(axis.wait, operation), flat)


def gather_into(output: torch.Tensor, tensor: torch.Tensor, axis: Axis, *, async_op: bool) -> dist.Work | None:
    """All-gathers flat tensors of equal length into the flat `output`."""
    if async_op:
        axis.begin("all_gather", tuple(tensor.shape))
        return _gather_flat(output, tensor, axis.group, async_op=True)
    with axis.during("all_gather", tuple(tensor.shape)):
        return _gather_flat(output, tensor, axis.group)


def scatter_into(
    output: torch.Tensor, tensor: torch.Tensor, axis: Axis, op: Any, *, async_op: bool
) -> dist.Work | None:
    """Reduce-scatters a flat tensor into `output`; `op`: one of torch's reductions."""
    if async_op:
        axis.begin("reduce_scatter", tuple(tensor.shape))
        return _scatter_flat(output, tensor, op, axis.group, async_op=True)
    with axis.during("reduce_scatter", tuple(tensor.shape)):
        return _scatter_flat(output, tensor, op, axis.group)


def _chunks(flat: torch.Tensor, axis: Axis) -> list[torch.Tensor]:
    """Chunks of a flat tensor: this member's first, then the others' in axis order."""
    assert flat.dim() == 1 and flat.numel() % axis.size == 0, (
        f"{tuple(flat.shape)} cannot be divided over {axis.size} ranks"
    )
    chunks = list(flat.chunk(axis.size))
    return [chunks.pop(axis.rank), *chunks]


def _peer_to_peer(axis: Axis) -> bool:
    """True if point-to-point messages are faster: gloo's all-gather copies the whole tensor, and its reduce-scatter is
    a full all-reduce."""
    return dist.get_backend(axis.group) == "gloo"


def _exchange(
    send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor], axis: Axis
) -> tuple[list[dist.Work], list[list[dist.Work]]]:
    """Starts sending one flat tensor to each other member, in axis order, and receiving one from each, part by part.
    Returns the sends, and the receives of each member."""
    peers = [rank for place, rank in enumerate(axis.ranks) if place != axis.rank]
    arrivals = [
        [_started(dist.irecv(part, peer, axis.group)) for part in whole.split(_PART)]
        for whole, peer in zip(receive, peers, strict=True)
    ]
    parts = ((part, peer) for whole, peer in zip(send, peers, strict=True) for part in whole.split(_PART))
    return [_started(dist.isend(part, peer, axis.group)) for part, peer in parts], arrivals


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not a member of the group"
    return work


def all_to_all(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Exchanges tensor [members, ...]: entry i goes to member i; the result's entry i comes from member i."""
    if axis.size == 1:
        return tensor
    assert tensor.shape[0] == axis.size, f"{tuple(tensor.shape)}: the first dimension must be {axis.size}"
    received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    with axis.during("all_to_all"):
        dist.all_to_all_single(received, tensor.contiguous(), group=axis.group)
    return received


def start_exchange(rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Pending:
    """Starts an all-to-all with unequal parts. `rows` are grouped by destination: `send[i]` of them go to member i. The
    result is grouped by source: `receive[i]` of them come from member i."""
    if axis.size == 1:
        return Pending(lambda: rows)
    rows = rows.contiguous()
    received = rows.new_empty((sum(receive), *rows.shape[1:]))
    operation = axis.begin("all_to_all")
    work = dist.all_to_all_single(received, rows, list(receive), list(send), axis.group, async_op=True)
    return Pending(lambda: received, [_started(work)], partial(axis.wait, operation), rows)


def start_shift(tensor: torch.Tensor, axis: Axis) -> Pending:
    """Starts sending `tensor` to the next member of the ring, and receiving one of the same shape from the previous
    member. All members must start the same shifts in the same order."""
    if axis.size == 1:
        return Pending(lambda: tensor)
    tensor = tensor.contiguous()
    received = torch.empty_like(tensor)
    following, previous = (axis.ranks[(axis.rank + step) % axis.size] for step in (1, -1))
    sending = dist.P2POp(dist.isend, tensor, following, axis.group)
    receiving = dist.P2POp(dist.irecv, received, previous, axis.group)
    operation = axis.begin("shift", tuple(tensor.shape))
    works = dist.batch_isend_irecv([sending, receiving])
    return Pending(lambda: received, works, partial(axis.wait, operation), tensor)


def own_piece(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Returns this member's piece of a tensor that all members hold, without communication."""
    if axis.size == 1:
        return tensor
    assert tensor.shape[dim] % axis.size == 0, (
        f"{tuple(tensor.shape)} cannot be divided along dimension {dim} over {axis.size} ranks"
    )
    return tensor.chunk(axis.size, dim)[axis.rank]


def barrier(axis: Axis) -> None:
    """Returns when every member has called it."""
    if axis.size > 1:
        with axis.during("barrier"):
            dist.barrier(axis.group)


Map = Callable[[torch.Tensor], torch.Tensor]


def differentiable(x: torch.Tensor, forward: Map, backward: Map) -> torch.Tensor:
    """Returns forward(x), a linear function of x, with autograd: `backward` maps the result's gradient to that of x."""
    return _Differentiable.apply(x, forward, backward)


class _Differentiable(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Map, backward: Map) -> torch.Tensor:
        ctx.transposed = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.transposed(grad), None, None
