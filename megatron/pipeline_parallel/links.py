"""Sends activations and gradients between the ranks of neighbouring stages, without waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.distributed.comm_log import CommOp
from megatron.distributed.state import Axis

Content = Literal["activation", "gradient"]
Link = tuple[Content, bool]
"""What is sent, and whether it wraps around from one end of the pipeline axis to the other."""

_LINKS: tuple[Link, ...] = (("activation", False), ("activation", True), ("gradient", False), ("gradient", True))


@dataclass(frozen=True)
class Message:
    """One tensor between two stages; sender and receiver derive the same tag from it."""

    what: Content
    stage: int  # the receiving one, numbered over the whole model
    micro_batch: int

    @property
    def tag(self) -> int:
        return (self.micro_batch << 12 | self.stage) << 1 | (self.what == "gradient")


class Links:
    """Asynchronous sends and receives: receives are posted ahead of their use, sends are kept alive until complete.

    gloo matches messages by tag. nccl has no tags and pairs the operations of two ranks in the order in which each rank
    issued them, so there every direction of activations and of gradients has a process group of its own: one side only
    sends on it, the other only receives, and both in the order of the passes.
    """

    def __init__(self, pp: Axis, links: Sequence[Axis] = ()) -> None:
        """`links`: `ParallelState.pp_links`, one group per direction, for backends without tags."""
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
        """Posts a receive; `take` waits for it."""
        assert message not in self._receiving, f"{message} is expected already"
        tensor = torch.empty(shape, dtype=like.dtype, device=like.device)
        group = self._axes[self._link(message, self._pp.rank)].group
        work = dist.irecv(tensor, self._pp.ranks[source], group=group, tag=message.tag)
        assert work is not None
        self._receiving[message] = tensor, work

    def _link(self, message: Message, receiver: int) -> Link:
        """With virtual stages the last rank also sends to the first. With two ranks each direction then carries both
        kinds of traffic, so the wrap-around has links of its own."""
        end = 0 if message.what == "activation" else self._pp.size - 1
        return message.what, receiver == end

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
                self._sending.popleft()[1].wait()
        assert not self._receiving, f"receives without a use: {list(self._receiving)}"
