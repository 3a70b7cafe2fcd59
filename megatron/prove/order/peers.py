"""The other ranks of a recorded one: made up, or real ones over gloo."""

from __future__ import annotations

import hashlib
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Said = dict[tuple[str, int, int], list[Tensor]]
"""Broadcasts, by the classes of a group's ranks (their digest), the number of these ranks (a part of a group may have
the same classes) and a count."""
Done = dist.Work | None
"""The operation's work, where it is executed."""


class Peers(ABC):
    """Answers each operation of one communicator."""

    @abstractmethod
    def all_reduce(self, tensors: Sequence[Tensor], opts: Any) -> Done: ...

    reduce = broadcast = all_reduce

    @abstractmethod
    def all_gather(self, inputs: Sequence[Tensor], outputs: Sequence[Sequence[Tensor]], opts: Any) -> Done: ...

    @abstractmethod
    def all_gather_flat(self, given: Tensor, output: Tensor, opts: Any) -> Done: ...

    @abstractmethod
    def reduce_scatter_flat(self, given: Tensor, output: Tensor, opts: Any) -> Done: ...

    @abstractmethod
    def gather(self, inputs: Sequence[Tensor], outputs: Sequence[Sequence[Tensor]], opts: Any) -> Done: ...

    @abstractmethod
    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> Done: ...

    @abstractmethod
    def all_to_all(
        self, given: Tensor, output: Tensor, received: Sequence[int], sent: Sequence[int], opts: Any
    ) -> Done: ...

    @abstractmethod
    def barrier(self, opts: Any) -> Done: ...

    @abstractmethod
    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Done: ...

    recv = send


MakePeers = Callable[[Any, tuple[int, ...]], Peers]
"""(what torch says of a new communicator, its ranks in the world) -> those who answer on it."""


@dataclass
class Script:
    """What the ranks recorded so far have broadcast. Each recorded rank stands for all ranks of its class."""

    stands_for: Callable[[int], int] = int
    broadcasts: Said = field(default_factory=dict)

    def __call__(self, options: Any, ranks: tuple[int, ...]) -> Peers:
        return Scripted(self, options, ranks)


def pack_broadcasts(broadcasts: Said) -> bytes:
    torch.save(broadcasts, file := io.BytesIO())
    return file.getvalue()


def unpack_broadcasts(content: bytes) -> Said:
    read: Said = torch.load(io.BytesIO(content), weights_only=True)
    return read


class Scripted(Peers):
    """Peers that hold the same values as this rank. One is added to every sum, so that no count, and no divisor, is
    zero."""

    def __init__(self, script: Script, options: Any, ranks: tuple[int, ...]) -> None:
        self.rank, self.size = options.group_rank, options.group_size
        self._said = script.broadcasts
        # One entry for each rank: the world is another group than one rank of each class.
        self._like = hashlib.sha256(repr(sorted(map(script.stands_for, ranks))).encode()).hexdigest()
        self._broadcasts = 0

    def all_reduce(self, tensors: Sequence[Tensor], opts: Any) -> Done:
        if opts.reduceOp == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.detach().add_(1)
        return None

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> Done:
        return self.all_reduce(tensors, opts)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Done:
        self._broadcasts += 1
        key = self._like, self.size, self._broadcasts
        if self.rank == opts.rootRank:
            self._said[key] = [tensor.detach().clone() for tensor in tensors]
        known = self._said.get(key, [])
        for number, tensor in enumerate(tensors):
            alike = number < len(known) and tensor.shape == known[number].shape
            tensor.detach().copy_(known[number]) if alike else tensor.detach().zero_()
        return None

    def all_gather(self, inputs: Sequence[Tensor], outputs: Sequence[Sequence[Tensor]], opts: Any) -> Done:
        for given, parts in zip(inputs, outputs, strict=True):
            for part in parts:
                part.detach().copy_(given)
        return None

    def all_gather_flat(self, given: Tensor, output: Tensor, opts: Any) -> Done:
        output.detach().view(self.size, -1).copy_(given.clone().reshape(1, -1))  # `given` may be a part of it
        return None

    def reduce_scatter_flat(self, given: Tensor, output: Tensor, opts: Any) -> Done:
        output.detach().copy_(given.reshape(self.size, *output.shape)[self.rank])
        return None

    def gather(self, inputs: Sequence[Tensor], outputs: Sequence[Sequence[Tensor]], opts: Any) -> Done:
        return self.all_gather(inputs, outputs, opts) if outputs and self.rank == opts.rootRank else None

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> Done:
        for number, output in enumerate(outputs):
            if inputs and inputs[0]:
                output.detach().copy_(inputs[number][self.rank])
            else:
                output.detach().zero_()
        return None

    def all_to_all(
        self, given: Tensor, output: Tensor, received: Sequence[int], sent: Sequence[int], opts: Any
    ) -> Done:
        output.detach().zero_()
        if given.shape == output.shape:
            output.detach().copy_(given)
        return None

    def barrier(self, opts: Any) -> Done:
        return None

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Done:
        return None

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Done:
        for tensor in tensors:
            tensor.detach().fill_(1)
        return None


class GlooPeers(Peers):
    """Real ranks: every operation is executed over gloo."""

    def __init__(self, options: Any, ranks: tuple[int, ...]) -> None:
        self._gloo: Any = dist.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, timeout=options.timeout
        )

    def all_reduce(self, tensors: Sequence[Tensor], opts: Any) -> Done:
        return self._gloo.allreduce(tensors, opts)

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> Done:
        return self._gloo.reduce(tensors, opts)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Done:
        return self._gloo.broadcast(tensors, opts)

    def all_gather(self, inputs: Sequence[Tensor], outputs: Sequence[Sequence[Tensor]], opts: Any) -> Done:
        return self._gloo.allgather(outputs, inputs, opts)

    def all_gather_flat(self, given: Tensor, output: Tensor, opts: Any) -> Done:
        return _named(self._gloo, "all_gather_single", "_allgather_base")(output, given, opts)

    def reduce_scatter_flat(self, given: Tensor, output: Tensor, opts: Any) -> Done:
        return _named(self._gloo, "reduce_scatter_single", "_reduce_scatter_base")(output, given, opts)

    def gather(self, inputs: Sequence[Tensor], outputs: Sequence[Sequence[Tensor]], opts: Any) -> Done:
        return self._gloo.gather(outputs, inputs, opts)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> Done:
        return self._gloo.scatter(outputs, inputs, opts)

    def all_to_all(
        self, given: Tensor, output: Tensor, received: Sequence[int], sent: Sequence[int], opts: Any
    ) -> Done:
        exchange = _named(self._gloo, "all_to_all_single", "alltoall_base")
        return exchange(output, given, list(received), list(sent), opts)

    def barrier(self, opts: Any) -> Done:
        return self._gloo.barrier(opts)

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Done:
        return self._gloo.send(tensors, peer, tag)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Done:
        return self._gloo.recv(tensors, peer, tag)


def _named(group: Any, *names: str) -> Any:
    """The method by the name that this torch has for it."""
    return next(getattr(group, name) for name in names if hasattr(group, name))
