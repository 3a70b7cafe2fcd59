"""Records a rank's operations at torch's process group, which sees all callers, such as `fully_shard`:

    with recorded(rank=3, world_size=1024) as tape:
        ...                             # builds the state, trains a step
    recording = tape.recording

The rank is alone in its process. Its peers are scripted: they hold the same values as this rank, and their messages
are made up, so that its control flow continues. With `peers=gloo_peers` the operations are executed by real ranks.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.prove.order.events import Communicator, Compute, Event, Mark, MessageSide, Op, Recording, Wait
from megatron.prove.order.peers import MakePeers, Script

BACKEND = "recorded"
_DATA_DECIDES = -1
_TorchGroup: Any = dist.ProcessGroup  # its overloads include ones that torch never calls


class Tape:
    """Recording in progress of the one rank of this process."""

    def __init__(self, rank: int, world_size: int, peers: MakePeers) -> None:
        self.rank, self.world_size, self.peers = rank, world_size, peers
        self.events: list[Event] = []
        self.waited: set[int] = set()
        self._groups: list[_RecordedGroup] = []
        self._made: dict[str, Communicator] = {}
        self._last: dict[str, Op] = {}
        self._count = 0
        self._batch: list[MessageSide] | None = None

    @property
    def recording(self) -> Recording:
        self._name_groups()
        return Recording(self.rank, dict(self._made), tuple(self.events))

    def mark(self, name: str) -> None:
        self.events.append(Mark(name))

    def compute(self, seconds: float) -> None:
        self.events.append(Compute(seconds))

    def note(self, group: str, kind: str, **what: Any) -> int:
        self._count += 1
        op = Op(self._count, group, kind, **what)
        self.events.append(op)
        self._last[group] = op
        return self._count

    def length_was_sent(self, group: str, kind: str, tensor: Tensor) -> bool:
        """Returns whether these are the bytes of a plain value, whose length the members have just exchanged. Made-up
        peers have this rank's value; a real rank with another value would send another length."""
        before = self._last.get(group)
        told = before is not None and (before.kind, before.size, before.dtype) == (kind, 1, "int64")
        return told and tensor.dtype == torch.uint8

    def message(self, group: str, message: MessageSide) -> int:
        if self._batch is None:
            return self.note(group, message.side, messages=(message,))
        self._batch.append(message)
        return self._count + 1  # the number that the batch will have

    def wait(self, number: int) -> None:
        if number not in self.waited:
            self.waited.add(number)
            self.events.append(Wait(number))

    def make_group(self, options: Any) -> "_RecordedGroup":
        ranks = tuple(options.global_ranks_in_group) or tuple(range(self.world_size))
        group = _RecordedGroup(self, options.group_id, ranks, self.peers(options, ranks))
        self._groups.append(group)
        self._made[options.group_id] = Communicator(options.group_id, ranks)
        return group

    def batched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `batch_isend_irecv` to record one operation, as nccl does."""

        def batch(operations: Sequence[Any]) -> Any:
            self._batch = []
            try:
                works = original(operations)
            finally:
                messages, self._batch = tuple(self._batch), None
            self.note(operations[0].group.communicator, "batch", messages=messages)
            return works

        return batch

    def close(self) -> None:
        self._name_groups()
        self._groups.clear()

    def _name_groups(self) -> None:
        """Updates the communicators' axes, which groups get after they are made."""
        for group in self._groups:
            made = self._made[group.communicator]
            self._made[made.name] = Communicator(made.name, made.ranks, group.axis)


@contextmanager
def recorded(
    rank: int, world_size: int, *, peers: MakePeers | None = None, store: dist.Store | None = None
) -> Iterator[Tape]:
    """Makes this process `rank` of a world in which every communicator is recorded, within the context."""
    tape, hook = Tape(rank, world_size, peers or Script()), sys.excepthook
    dist.Backend.register_backend(
        BACKEND, lambda options, _: tape.make_group(options), extended_api=True, devices=["cpu"]
    )
    dist.init_process_group(BACKEND, rank=rank, world_size=world_size, store=store or dist.HashStore())
    try:
        with patch.object(dist, "batch_isend_irecv", tape.batched(dist.batch_isend_irecv)):
            yield tape
    finally:
        tape.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.excepthook = hook  # torch's hook prefixes the rank


class _RecordedWork(dist.Work):
    def __init__(self, tape: Tape, number: int, real: dist.Work | None) -> None:
        super().__init__()
        self._tape, self._number, self._real = tape, number, real

    def wait(self, timeout: Any = None) -> bool:
        self._tape.wait(self._number)
        if self._real is not None:
            self._real.wait()
        return True

    def is_completed(self) -> bool:
        return self._real is not None and self._real.is_completed()


class _RecordedGroup(_TorchGroup):
    """Recorded communicator. torch calls these methods, by its own names."""

    def __init__(self, tape: Tape, name: str, ranks: tuple[int, ...], peers: Any) -> None:
        super().__init__(ranks.index(tape.rank), len(ranks))
        self.tape, self.communicator, self.ranks, self.peers = tape, name, ranks, peers

    @property
    def group_name(self) -> str:
        return self.communicator

    @property
    def axis(self) -> str:
        return "world" if len(self.ranks) == self.tape.world_size else str(self.group_desc)

    def _get_backend(self, device: torch.device) -> "_RecordedGroup":
        return self  # torch 2.14 asks it for coalescing, which this one lacks

    def getBackendName(self) -> str:
        return BACKEND

    def _collective(
        self, kind: str, answer: Any, *asked: Any, given: Any = None, size: int | None = None, detail: str = ""
    ) -> dist.Work:
        """Records a collective and returns `answer(*asked)`. `given`: this rank's input, if not first in `asked`."""
        tensors = [each for each in _flat((given, asked)) if isinstance(each, Tensor)]
        axis = self.axis
        for each in tensors:
            _check_sendable(each, kind, axis)
        tensor = tensors[0] if tensors else None
        elements = 0 if tensor is None else tensor.numel()
        size = elements if size is None else size
        if tensor is not None and self.tape.length_was_sent(self.communicator, kind, tensor):
            size = _DATA_DECIDES
        dtype = "" if tensor is None else str(tensor.dtype).removeprefix("torch.")
        number = self.tape.note(
            self.communicator, kind, size=size, dtype=dtype, detail=detail, given=max(size, elements)
        )
        return _RecordedWork(self.tape, number, answer(*asked))

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self._collective("all_reduce", self.peers.allreduce, tensors, opts, detail=_reduction(opts))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        size = sum(tensor.numel() for tensor in tensors)
        answer = self.peers.allreduce
        return self._collective("all_reduce", answer, tensors, opts, size=size, detail=_reduction(opts))

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        detail = f"{_reduction(opts)} to {self.ranks[opts.rootRank]}"
        return self._collective("reduce", self.peers.reduce, tensors, opts, detail=detail)

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        detail = f"from {self.ranks[opts.rootRank]}"
        return self._collective("broadcast", self.peers.broadcast, tensors, opts, detail=detail)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._collective("all_gather", self.peers.allgather, outputs, inputs, opts, given=inputs)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        answer = _named(self.peers, "all_gather_single", "_allgather_base")
        return self._collective("all_gather", answer, output, given, opts, given=(given,))

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        answer = _named(self.peers, "reduce_scatter_single", "_reduce_scatter_base")
        detail = _reduction(opts)
        return self._collective("reduce_scatter", answer, output, given, opts, given=(given,), detail=detail)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        detail = f"to {self.ranks[opts.rootRank]}"
        return self._collective("gather", self.peers.gather, outputs, inputs, opts, given=inputs, detail=detail)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        detail = f"from {self.ranks[opts.rootRank]}"
        return self._collective("scatter", self.peers.scatter, outputs, inputs, opts, detail=detail)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int], opts: Any = None
    ) -> dist.Work:
        answer = _named(self.peers, "all_to_all_single", "alltoall_base")
        size = _DATA_DECIDES if list(received) or list(sent) else given.numel()
        return self._collective("all_to_all", answer, output, given, received, sent, opts, given=(given,), size=size)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._collective("barrier", self.peers.barrier, opts)

    def send(self, tensors: Any, peer: int, tag: int) -> dist.Work:
        return self._message("send", self.peers.send, tensors, peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int) -> dist.Work:
        return self._message("recv", self.peers.recv, tensors, peer, tag)

    def _message(self, side: Any, answer: Any, tensors: Any, peer: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        _check_sendable(tensor, side, self.axis)
        dtype = str(tensor.dtype).removeprefix("torch.")
        message = MessageSide(side, self.ranks[peer], tensor.numel(), dtype, tag)
        number = self.tape.message(self.communicator, message)
        return _RecordedWork(self.tape, number, answer(tensors, peer, tag))

    # torch before 2.13
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


_SENDABLE = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool)


def _check_sendable(tensor: Tensor, kind: str, axis: str) -> None:
    """Raises for what nccl rejects and gloo may accept: unsupported dtypes, and tensors that are not contiguous. For a
    message, nccl would only warn and send wrong numbers, because sender and receiver may have different strides."""
    if tensor.is_contiguous() and (tensor.is_floating_point() or tensor.dtype in _SENDABLE):
        return
    gaps = "" if tensor.is_contiguous() else f" that is not contiguous (strides {list(tensor.stride())})"
    raise AssertionError(
        f"{kind} over {axis}: nccl does not take a tensor {list(tensor.shape)} of {tensor.dtype}{gaps}"
    )


def _named(group: Any, *names: str) -> Any:
    """Returns the method under the first name that this version of torch has."""
    return next(getattr(group, name) for name in names if hasattr(group, name))


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


def _reduction(opts: Any) -> str:
    op = opts.reduceOp
    return next((name for name in ("SUM", "MAX", "MIN", "AVG", "PRODUCT") if op == getattr(dist.ReduceOp, name)), "")
