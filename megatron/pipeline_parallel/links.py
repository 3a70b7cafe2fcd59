"""Asynchronous sends of activations and gradients between the ranks of neighbouring stages."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.distributed.comm_log import CommOp
from megatron.distributed.parallel_state import Axis, LinkEnd

Content = Literal["activation", "gradient"]


@dataclass(frozen=True)
class Message:
    """One tensor between two stages; sender and receiver derive the same tag from it."""

    what: Content
    stage: int  # receiving stage, numbered over the whole model
    micro_batch: int

    @property
    def tag(self) -> int:
        return (self.micro_batch << 12 | self.stage) << 1 | (self.what == "gradient")


class Links:
    """Asynchronous sends and receives. A receive is posted before its message is needed; a sent tensor is kept until
    the send is complete.

    gloo matches messages by tag. NCCL has no tags: it pairs the operations of two ranks in issue order, and runs the
    operations of a process group one after the other. With NCCL every link (activations or gradients from one stage to
    its neighbour) is therefore a process group of two ranks, one of which only sends.
    """

    def __init__(self, pp: Axis, links: Mapping[LinkEnd, Axis] | None = None) -> None:
        """`links`: `ParallelState.pp_links`, for backends without tags."""
        self._pp, self._axes = pp, links or {}
        self._receiving: dict[Message, tuple[Tensor, dist.Work]] = {}
        self._sending: deque[tuple[Tensor, dist.Work]] = deque()

    def connect(self, device: torch.device) -> None:
        """Sends one number over every link, in the same order on all ranks. NCCL connects two ranks at their first
        message, and the host blocks until the peer connects too. Connecting during a step could deadlock, because ranks
        then also wait for other messages."""
        for (_, sends), axis in self._axes.items():
            number, other = torch.zeros(1, device=device), axis.ranks[1 - axis.rank]
            with axis.wait(CommOp("connect", axis.name, axis.ranks)):
                (dist.send if sends else dist.recv)(number, other, axis.group)

    def send(self, tensor: Tensor, message: Message, to: int) -> None:
        """Starts sending. `to`: rank on the pipeline axis."""
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self._pp.ranks[to], group=self._group(message, sends=True), tag=message.tag)
        assert work is not None
        self._sending.append((tensor, work))
        while self._sending and self._sending[0][1].is_completed():
            self._sending.popleft()

    def expect(self, message: Message, shape: tuple[int, ...], like: Tensor, source: int) -> None:
        """Posts a receive of a tensor like `like`, but of this shape. `take` waits for it. `source`: rank on the
        pipeline axis."""
        assert message not in self._receiving, f"a receive of {message} is posted already"
        tensor = torch.empty(shape, dtype=like.dtype, device=like.device)
        group = self._group(message, sends=False)
        work = dist.irecv(tensor, self._pp.ranks[source], group=group, tag=message.tag)
        assert work is not None
        self._receiving[message] = tensor, work

    def _group(self, message: Message, *, sends: bool) -> dist.ProcessGroup:
        return self._axes.get((message.what, sends), self._pp).group

    def take(self, message: Message) -> Tensor:
        tensor, work = self._receiving.pop(message)
        name = f"receive the {message.what} of micro-batch {message.micro_batch} for stage {message.stage}"
        with self._pp.wait(CommOp(name, self._pp.name, self._pp.ranks)):
            work.wait()
        return tensor

    def finish(self) -> None:
        """Waits until all sends are complete."""
        while self._sending:
            with self._pp.wait(CommOp("send the remaining messages", self._pp.name, self._pp.ranks)):
                self._sending[0][1].wait()
            self._sending.popleft()  # the tensor may be freed only now
        assert not self._receiving, f"receives that were posted but not used: {list(self._receiving)}"
