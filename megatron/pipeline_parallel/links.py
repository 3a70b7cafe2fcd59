"""Activations and their gradients between the ranks that hold neighbouring stages."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.distributed.state import Axis

What = Literal["activation", "gradient"]


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
    """Sends and receives without waiting: receives come ahead of their use, sends are forgotten until done."""

    def __init__(self, pp: Axis) -> None:
        self._pp = pp
        self._receiving: dict[Message, tuple[Tensor, dist.Work]] = {}
        self._sending: deque[tuple[Tensor, dist.Work]] = deque()

    def send(self, tensor: Tensor, message: Message, to: int) -> None:
        """`to` is a place on the pipeline axis."""
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self._pp.ranks[to], group=self._pp.group, tag=message.tag)
        assert work is not None
        self._sending.append((tensor, work))
        while self._sending and self._sending[0][1].is_completed():
            self._sending.popleft()

    def expect(self, message: Message, shape: tuple[int, ...], like: Tensor, source: int) -> None:
        """Posts the receive; `take` waits for it."""
        if message in self._receiving:
            return
        tensor = torch.empty(shape, dtype=like.dtype, device=like.device)
        work = dist.irecv(tensor, self._pp.ranks[source], group=self._pp.group, tag=message.tag)
        assert work is not None
        self._receiving[message] = tensor, work

    def take(self, message: Message) -> Tensor:
        tensor, work = self._receiving.pop(message)
        work.wait()
        return tensor

    def finish(self) -> None:
        """Waits until everything sent has left."""
        while self._sending:
            self._sending.popleft()[1].wait()
        assert not self._receiving, f"received and never used: {list(self._receiving)}"
