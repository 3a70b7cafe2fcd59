"""Peers of a recorded rank: scripted, or real ones over gloo."""

import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Said = dict[tuple[str, int, int], list[Tensor]]
"""Broadcasts by group and number. A group is identified by the digest of its ranks' classes and by its size, because a
part of a group may have the same classes."""
Done = dist.Work | None
"""Work of an operation that is executed, else None."""
MakePeers = Callable[[Any, tuple[int, ...]], Any]
"""Function from (torch's options of a new communicator, its ranks in the world) to its peers. These have the methods of
torch's process group, each of which answers one operation."""


def gloo_peers(options: Any, ranks: tuple[int, ...]) -> Any:
    """Returns real peers: every operation is executed over gloo."""
    return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)


@dataclass
class Script:
    """Broadcasts of the ranks recorded so far. Each recorded rank stands for all ranks of its class."""

    stands_for: Callable[[int], int] = int
    broadcasts: Said = field(default_factory=dict)

    def __call__(self, options: Any, ranks: tuple[int, ...]) -> "Scripted":
        return Scripted(self, options, ranks)


def pack_broadcasts(broadcasts: Said) -> bytes:
    torch.save(broadcasts, file := io.BytesIO())
    return file.getvalue()


def unpack_broadcasts(content: bytes) -> Said:
    read: Said = torch.load(io.BytesIO(content), weights_only=True)
    return read


class Scripted:
    """Peers that hold the same values as this rank. Sums are one larger, so that no count and no divisor is zero."""

    def __init__(self, script: Script, options: Any, ranks: tuple[int, ...]) -> None:
        self.rank, self.size = options.group_rank, options.group_size
        self._said = script.broadcasts
        # One entry per rank, so the world differs from a group with one rank of each class.
        self._like = hashlib.sha256(repr(sorted(map(script.stands_for, ranks))).encode()).hexdigest()
        self._broadcasts = 0

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> Done:
        if opts.reduceOp == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.detach().add_(1)
        return None

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> Done:
        return self.allreduce(tensors, opts)

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

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> Done:
        for given, parts in zip(inputs, outputs, strict=True):
            for part in parts:
                part.detach().copy_(given)
        return None

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any) -> Done:
        output.detach().view(self.size, -1).copy_(given.clone().reshape(1, -1))  # `given` may be a part of `output`
        return None

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any) -> Done:
        output.detach().copy_(given.reshape(self.size, *output.shape)[self.rank])
        return None

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> Done:
        return self.allgather(outputs, inputs, opts) if outputs and self.rank == opts.rootRank else None

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> Done:
        for number, output in enumerate(outputs):
            if inputs and inputs[0]:
                output.detach().copy_(inputs[number][self.rank])
            else:
                output.detach().zero_()
        return None

    def all_to_all_single(
        self, output: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int], opts: Any
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
