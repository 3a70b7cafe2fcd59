"""A gloo backend as unforgiving as NCCL: `wait()` orders and does not block.

A receive buffer holds NaN until it was waited for and another operation follows. Until then, send and receive buffers
belong to the operation. These are errors, which name the line and the operation in flight: a result that is read too
early, a write to a buffer that is being sent, a freed buffer in flight, a missing wait.

    with unforgiving():                       # before ranks are forked
        run_ranks(4, body)
    ...
    def body(rank): with order_of_operations(): ...
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.cluster.host_waits import Place, here

_NAME = "unforgiving"
_COLLECTIVES = ("megatron/distributed/collectives.py", "megatron/distributed/messages.py")
_LOOK_AT_SHAPES = {"empty_like", "new_empty", "new_empty_strided", "new_zeros", "zeros_like", "full_like", "new_full"}
_LOOK_AT_SHAPES |= {"detach", "alias", "ones_like", "new_ones"}


class Unforgiven(AssertionError):
    """Something that works on gloo and would not on NCCL."""


@dataclass(frozen=True)
class _Region:
    """Bytes of a tensor, without keeping it alive."""

    storage: weakref.ref[Any]
    key: int
    start: int
    stop: int
    like: tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]

    @staticmethod
    def of(tensor: Tensor) -> _Region:
        storage, size = tensor.untyped_storage(), tensor.element_size()
        start = tensor.storage_offset() * size
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
        like = tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()
        stop = start + (last + 1) * size if tensor.numel() else start
        return _Region(weakref.ref(storage), storage._cdata, start, stop, like)

    def touches(self, other: _Region) -> bool:
        return self.key == other.key and self.start < other.stop and other.start < self.stop

    def tensor(self) -> Tensor | None:
        storage = self.storage()
        if storage is None:
            return None
        dtype, shape, stride, offset = self.like
        return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


@dataclass
class _Flight:
    """An operation from its issue to the first one after its wait, with its tensors and gloo's own copies of them."""

    what: str
    place: Place
    into: Sequence[tuple[_Region, Tensor]]
    out_of: Sequence[tuple[_Region, Tensor]]
    work: Any = None
    waited: bool = False

    def __str__(self) -> str:
        return f"{self.what}, which {self.place} began"


@dataclass
class _Work:
    flight: _Flight
    order: Order

    def wait(self, timeout: Any = None) -> bool:
        self.order.wait(self.flight)
        return True

    def is_completed(self) -> bool:
        """Returns False until it is waited for: code must not rely on earlier completion."""
        return self.flight.waited

    def is_success(self) -> bool:
        return True


@dataclass
class Order:
    """Operations of one rank in the order in which it issues them."""

    flying: list[_Flight] = field(default_factory=list)
    arriving: list[_Flight] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)

    def begin(
        self,
        what: str,
        into: Sequence[Tensor],
        out_of: Sequence[Tensor],
        start: Callable[[list[Tensor], list[Tensor]], Any],
    ) -> _Work:
        """`start` gets gloo's own tensors. A tensor that is both sent and received is in `into` only."""
        self.arrive()
        for tensor in (*into, *out_of):
            self.check(lambda: f"{what} by {_caller()}", [tensor], [])
        with _disable_current_modes(), torch.no_grad():
            arriving, leaving = (
                [t.detach().clone(memory_format=torch.contiguous_format) for t in ts] for ts in (into, out_of)
            )
            regions = [[_Region.of(t) for t in ts] for ts in (into, out_of)]
            sent = [
                (region, data)  # overlapping memory: the received data replaces it
                for region, data in zip(regions[1], leaving)
                if not any(region.touches(other) for other in regions[0])
            ]
            flight = _Flight(what, _caller(), list(zip(regions[0], arriving)), sent)
            for tensor in into:
                _poison(tensor)
            flight.work = start(arriving, leaving)
        for region in (*regions[0], *regions[1]):
            storage = region.storage()
            assert storage is not None
            weakref.finalize(storage, self._freed, flight)
        self.flying.append(flight)
        return _Work(flight, self)

    def wait(self, flight: _Flight) -> None:
        if flight.waited:
            return
        flight.waited = True
        self.flying.remove(flight)
        self.arriving.append(flight)
        with _disable_current_modes():
            for region, sent in flight.out_of:
                now = region.tensor()
                if now is not None and not torch.equal(now.detach().nan_to_num(), sent.nan_to_num()):
                    raise Unforgiven(f"{flight}: what it sends was changed before its wait()")

    def arrive(self) -> None:
        """Delivers the data of operations that were waited for, before the next operation."""
        if self.mistakes:
            raise Unforgiven(self.mistakes[0])
        if not self.arriving:
            return
        flights, self.arriving = self.arriving, []
        with _disable_current_modes(), torch.no_grad():
            for flight in flights:
                if flight.work is not None:
                    flight.work.wait()
                for region, data in flight.into:
                    tensor = region.tensor()
                    if tensor is not None:
                        tensor.copy_(data)

    def check(self, what: Callable[[], str], reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Raises if reads or writes touch a buffer in flight; a send buffer may be read. `what` names the code."""
        if not self.flying:
            return
        written = [_Region.of(tensor) for tensor in writes]
        used = [*(_Region.of(tensor) for tensor in reads), *written]
        for flight in self.flying:
            if any(region.touches(other) for region, _ in flight.into for other in used):
                raise Unforgiven(f"{what()} uses what {flight} still receives: its wait() comes later")
            if any(region.touches(other) for region, _ in flight.out_of for other in written):
                raise Unforgiven(f"{what()} writes to what {flight} still sends: its wait() comes later")

    def end(self) -> None:
        self.arrive()
        if self.flying:
            raise Unforgiven(f"nobody waited for {self.flying[0]}")

    def _freed(self, flight: _Flight) -> None:
        if not flight.waited:
            self.mistakes.append(f"a buffer of {flight} was freed before its wait()")


class _Watch(TorchDispatchMode):
    def __init__(self, order: Order) -> None:
        super().__init__()
        self._order = order

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        self._order.arrive()
        if self._order.flying and not func.is_view and func.overloadpacket.__name__ not in _LOOK_AT_SHAPES:
            written, read = [], []
            for argument, value in zip(func._schema.arguments, args):
                changes = argument.alias_info is not None and argument.alias_info.is_write
                (written if changes else read).extend(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
            for name, value in kwargs.items():
                (written if name == "out" else read).extend(x for x in tree_leaves(value) if isinstance(x, Tensor))
            if written or read:
                self._order.check(lambda: f"{_caller()}: {func.overloadpacket.__name__}", read, written)
        return func(*args, **kwargs)


class _Group(dist.ProcessGroup):
    """gloo with its own copies of the tensors."""

    def __init__(self, order: Order, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.order, self._gloo = order, dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    def getBackendName(self) -> str:
        return _NAME

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> _Work:
        return self.order.begin("all_reduce", tensors, (), lambda into, _: self._gloo.allreduce(into, options))

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> _Work:
        return self.order.begin("broadcast", tensors, (), lambda into, _: self._gloo.broadcast(into, options))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> _Work:
        return self.order.begin(
            "all_gather", outputs[0], inputs, lambda into, out: self._gloo.allgather([into], out, options)
        )

    def all_gather_single(self, output: Tensor, tensor: Tensor, options: Any = None) -> _Work:
        return self.order.begin(
            "all_gather", [output], [tensor], lambda into, out: self._gloo._allgather_base(into[0], out[0], options)
        )

    _allgather_base = all_gather_single  # the names of torch before 2.13

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, options: Any = None) -> _Work:
        return self.order.begin(
            "reduce_scatter",
            [output],
            [tensor],
            lambda into, out: self._gloo._reduce_scatter_base(into[0], out[0], options),
        )

    _reduce_scatter_base = reduce_scatter_single

    def all_to_all_single(self, output: Tensor, tensor: Tensor, arrive: Any, leave: Any, options: Any = None) -> _Work:
        return self.order.begin(
            "all_to_all",
            [output],
            [tensor],
            lambda into, out: self._gloo.alltoall_base(into[0], out[0], arrive, leave, options),
        )

    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> _Work:
        return self.order.begin(f"send to {to}", (), tensors, lambda _, out: self._gloo.send(out, to, tag))

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> _Work:
        return self.order.begin(
            f"receive from {source}", tensors, (), lambda into, _: self._gloo.recv(into, source, tag)
        )

    def barrier(self, opts: Any = None) -> Any:
        self.order.arrive()
        return self._gloo.barrier()


@contextlib.contextmanager
def unforgiving() -> Iterator[None]:
    """Replaces gloo by this backend in ranks that are forked inside."""
    begin = dist.init_process_group

    def init(backend: str, **settings: Any) -> None:
        order = Order()
        dist.Backend.register_backend(_NAME, partial(_group, order), devices=["cpu"])
        begin(_NAME if backend == "gloo" else backend, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", init)
        yield


def _group(order: Order, store: Any, rank: int, size: int, timeout: Any) -> _Group:
    return _Group(order, store, rank, size, timeout)


@contextlib.contextmanager
def order_of_operations() -> Iterator[Order]:
    """Watches this rank's operations, including device-to-host copies in stream order (`tolist`, `cpu`)."""
    world = dist.group.WORLD
    assert isinstance(world, _Group)
    order = world.order
    with pytest.MonkeyPatch.context() as patch, _Watch(order):
        for name in ("tolist", "cpu"):
            patch.setattr(Tensor, name, _in_order(getattr(Tensor, name), order))
        yield order
        order.end()


def _in_order(method: Callable[..., Any], order: Order) -> Callable[..., Any]:
    def called(tensor: Tensor, *args: Any, **named: Any) -> Any:
        order.arrive()
        order.check(lambda: f"{_caller()}: {method.__name__}", [tensor], [])
        return method(tensor, *args, **named)

    return called


def _poison(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _caller() -> Place:
    """Place of the caller, without its names: they would keep alive what may be freed."""
    return replace(here(beyond=_COLLECTIVES), names={})
