"""Activations and their gradients between the ranks that hold neighbouring stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.distributed.operations import Operation
from megatron.distributed.state import Axis

What = Literal["activation", "gradient"]
Link = tuple[What, bool]
"""What travels, and whether from one end of the axis around to the other."""

_LINKS: tuple[Link, ...] = (("activation", False), ("activation", True), ("gradient", False), ("gradient", True))


@dataclass(frozen=True)
class Message:
    """What a stage needs from, or has for, another: the tag says which on both sides."""

    what: What
    stage: int  # of the whole model, the one that receives
    micro_batch: int

    @property
    def tag(self) -> int:
        return (self.micro_batch << 12 | self.stage) << 1 | (self.what == "gradient")


class Links:
    """Sends and receives without waiting: receives come ahead of their use, sends are forgotten until done.

    gloo finds a message by its tag. nccl works off what two ranks exchange in the order in which each of them asked
    for it, so there every direction of every kind has a process group to itself: on one side of such a link there are
    only sends, on the other only receives, and both follow the order of the passes.
    """

    def __init__(self, pp: Axis, links: Sequence[Axis] = ()) -> None:
        """`links`: a process group for each direction (`ParallelState.pp_links`), where the backend has no tags."""
        self._pp = pp
        self._axes = dict(zip(_LINKS, links, strict=True)) if links else dict.fromkeys(_LINKS, pp)
        self._receiving: dict[Message, tuple[Tensor, dist.Work]] = {}
        self._sending: deque[tuple[Tensor, dist.Work]] = deque()

    def send(self, tensor: Tensor, message: Message, to: int) -> None:
        """`to` is a place on the pipeline axis."""
        tensor = tensor.contiguous()
        group = self._axes[self._link(message, to)].group
        work = dist.isend(tensor, self._pp.ranks[to], group=group, tag=message.tag)
        assert work is not None
        self._sending.append((tensor, work))
        while self._sending and self._sending[0][1].is_completed():
            self._sending.popleft()

    def expect(self, message: Message, shape: tuple[int, ...], like: Tensor, source: int) -> None:
        """Posts the receive; `take` waits for it."""
        assert message not in self._receiving, f"{message} is expected already"
        tensor = torch.empty(shape, dtype=like.dtype, device=like.device)
        group = self._axes[self._link(message, self._pp.rank)].group
        work = dist.irecv(tensor, self._pp.ranks[source], group=group, tag=message.tag)
        assert work is not None
        self._receiving[message] = tensor, work

    def _link(self, message: Message, receiver: int) -> Link:
        """With virtual stages the last rank passes on to the first: between two ranks, both directions have both."""
        end = 0 if message.what == "activation" else self._pp.size - 1
        return message.what, receiver == end

    def take(self, message: Message) -> Tensor:
        tensor, work = self._receiving.pop(message)
        name = f"receive the {message.what} of micro-batch {message.micro_batch} for stage {message.stage}"
        with self._pp.wait(Operation(name, self._pp.name, self._pp.ranks)):
            work.wait()
        return tensor

    def finish(self) -> None:
        """Waits until everything sent has left."""
        while self._sending:
            with self._pp.wait(Operation("send what is left", self._pp.name, self._pp.ranks)):
                self._sending.popleft()[1].wait()
        assert not self._receiving, f"received and never used: {list(self._receiving)}"
