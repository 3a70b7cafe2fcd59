"""Records the real `Pipeline` with stages that compute nothing and only declare a duration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.distributed.parallel_state import ParallelState
from megatron.layout import Layout
from megatron.model.wgrads import WgradQueue
from megatron.pipeline_parallel.links import Links
from megatron.pipeline_parallel.pipeline import Pipeline
from megatron.pipeline_schedules import schedule_of
from megatron.prove.order.events import Recording
from megatron.prove.order.recorder import Tape, recorded

WIDTH = 2


class _Timed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tape: Tape, forward: float, backward: float) -> Tensor:
        ctx.tape, ctx.seconds = tape, backward
        tape.compute(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        ctx.tape.compute(ctx.seconds)
        return grad, None, None, None


class _Stage:
    """One chunk: a forward pass of `seconds`, and a backward pass of twice that."""

    def __init__(self, tape: Tape, seconds: float, deferred: bool) -> None:
        self.tape, self.seconds, self.deferred = tape, seconds, deferred

    def __call__(self, batch: Any, *, hidden: Tensor | None = None) -> Tensor:
        x = torch.ones(WIDTH, requires_grad=True) if hidden is None else hidden
        return _Timed.apply(x, self.tape, self.seconds, self.seconds * (1 if self.deferred else 2))


class _Wgrads(WgradQueue):
    def __init__(self, tape: Tape, seconds: float) -> None:
        super().__init__()
        self.tape, self.seconds = tape, seconds

    def end_of_pass(self) -> None:
        pass

    def run(self) -> None:
        self.tape.compute(self.seconds)


def record_pipeline(
    name: str, ranks: int, micro_batches: int, chunks: int = 1, steps: int = 1, group: int | None = None
) -> dict[int, Recording]:
    return {rank: _record(name, ranks, rank, micro_batches, chunks, steps, group) for rank in range(ranks)}


def _record(
    name: str, ranks: int, rank: int, micro_batches: int, chunks: int, steps: int, group: int | None
) -> Recording:
    with recorded(rank, ranks) as tape:
        state = ParallelState.build(Layout(ranks, pp=ranks), rank)
        links = Links(state.pp, state.pp_links)
        links.connect(torch.device("cpu"))
        deferred, seconds = name == "zero-bubble", 1.0 / chunks
        pipeline = Pipeline(
            [_Stage(tape, seconds, deferred) for _ in range(chunks)],
            state.pp,
            schedule_of(name, group),
            loss_step=lambda stage, batch: (stage(batch).sum(), torch.ones(())),
            hidden_step=lambda stage, batch, hidden: stage(batch, hidden=hidden),
            hidden_like=lambda batch: ((WIDTH,), torch.empty(0)),
            wgrad_queue=_Wgrads(tape, seconds) if deferred else None,
            links=links,
        )
        for _ in range(steps):
            pipeline.forward_backward([{}] * micro_batches, 1.0, lambda: None)
        return tape.recording
