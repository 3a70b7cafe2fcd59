"""When each pass of a pipelined step ran, and how much of that time is bubble."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pipeline_parallel.schedules import Action


@dataclass(frozen=True)
class Span:
    """One action of one rank, from start to end."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of all ranks in one step."""

    spans: tuple[Span, ...]
    ranks: int
    micro_batches: int
    chunks: int

    @property
    def end(self) -> float:
        return max(span.end for span in self.spans)

    @property
    def defers_wgrads(self) -> bool:
        """Whether weight gradients are separate passes (W), as in the zero-bubble schedule."""
        return any(span.action.kind == "W" for span in self.spans)

    @property
    def bubble(self) -> float:
        """Idle time over busy time, of all ranks from the first start to the last end."""
        busy = sum(span.end - span.start for span in self.spans)
        whole = self.ranks * (self.end - min(span.start for span in self.spans))
        return (whole - busy) / busy

    @property
    def theoretical_bubble(self) -> float:
        """The bubble with equal stages: (p - 1) / (m v) for GPipe, 1F1B and the interleaved schedule; (p - 1) / (3 m)
        for zero-bubble, where F, B and W take equally long."""
        return (self.ranks - 1) / (self.micro_batches * (3 if self.defers_wgrads else self.chunks))
