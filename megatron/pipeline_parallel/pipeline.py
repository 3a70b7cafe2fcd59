"""One rank's part of a pipelined step: works off its schedule, with activations coming in and gradients going back.

    pipeline = Pipeline(stages, state.pp, SCHEDULES["1f1b"], ...)
    losses, totals = pipeline.forward_backward(micro_batches, factor, grads)

It stands where the engine's single pass stands otherwise: it knows nothing of optimizers, and of the model only that
a stage turns a batch and the hidden states of the stage before into hidden states, or on the last stage into a loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.distributed.state import Axis
from megatron.distributed.wgrad_queue import WgradQueue
from megatron.pipeline_parallel.links import Links, Message
from megatron.pipeline_parallel.schedules import Action, Schedule
from megatron.pipeline_parallel.trace import StepTrace

Batch = Mapping[str, Any]
LossStep = Callable[[Any, Batch], tuple[Tensor, Tensor]]
"""(model, batch) -> (sum of the losses over the counted tokens, their number)."""
HiddenStep = Callable[[nn.Module, Batch, Tensor | None], Tensor]
"""(stage, batch, hidden states of the stage before or None for the first) -> its hidden states."""
HiddenLike = Callable[[Batch], tuple[tuple[int, ...], Tensor]]
"""batch -> shape of the hidden states between stages, and a tensor of their dtype and device."""
_AHEAD = 2  # receives posted ahead of their use


class Pipeline:
    def __init__(
        self,
        stages: Sequence[nn.Module],
        pp: Axis,
        schedule: Schedule,
        *,
        loss_step: LossStep,
        hidden_step: HiddenStep,
        hidden_like: HiddenLike,
        wgrad_queue: WgradQueue | None = None,
        links: Sequence[Axis] = (),
    ) -> None:
        """`stages` are this rank's, in the order of the model; `links` is `ParallelState.pp_links`."""
        self.stages, self.pp, self.schedule = list(stages), pp, schedule
        self.loss_step, self.hidden_step, self.hidden_like = loss_step, hidden_step, hidden_like
        self.wgrad_queue = wgrad_queue
        self.links = Links(pp, links)
        self.trace: StepTrace | None = None  # told of every action with its start and end, to draw it

    @property
    def last(self) -> int:
        """The number of the model's last stage."""
        return len(self.stages) * self.pp.size - 1

    def forward_backward(
        self, batches: Sequence[Batch], factor: float | Tensor, arm: Callable[[], None]
    ) -> list[tuple[Tensor, Tensor]]:
        """Gradients of the summed loss times `factor`. On the rank of the last stage (loss sum, count) of every
        micro-batch, elsewhere nothing. `arm` is called when only the last micro-batch's gradients are still to come."""
        step = _Step(self, batches, factor)
        if self.trace is not None:
            self.trace.restart(self.pp, len(batches), len(self.stages))
        actions = self.schedule(self.pp.size, self.pp.rank, len(batches), len(self.stages))
        needs = [message for action in actions if (message := step.needs(action)) is not None]
        posted = iter(needs)
        armed_at = _last_pass(actions, len(batches) - 1)
        for _ in range(_AHEAD):
            step.expect(posted)
        for position, action in enumerate(actions):
            if position == armed_at:
                arm()
            started = time.time()
            if step.run(action):
                step.expect(posted)
            if self.trace is not None:
                self.trace.note(action, step.started or started, time.time())
        self.links.finish()
        return step.results

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """One batch through all stages without gradients; the loss on the rank of the last stage."""
        step = _Step(self, [batch], 1.0)
        for chunk in range(len(self.stages)):
            action = Action("F", chunk, 0)
            message = step.needs(action)
            step.expect(iter([message] if message else []))
            step.run(action)
        self.links.finish()
        return step.results[0] if step.results else None


class _Step:
    """The state of one step: what was kept for the backward passes that are still to come."""

    def __init__(self, pipeline: Pipeline, batches: Sequence[Batch], factor: float | Tensor) -> None:
        self.p, self.batches, self.factor = pipeline, batches, factor
        self.kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}  # (chunk, micro-batch): input, output
        self.results: list[tuple[Tensor, Tensor]] = []
        self.started: float | None = None  # when what the last action waited for had arrived

    def stage(self, action: Action) -> int:
        return action.chunk * self.p.pp.size + self.p.pp.rank

    def needs(self, action: Action) -> Message | None:
        """What must have arrived before the action can run."""
        stage = self.stage(action)
        if action.kind == "F" and stage > 0:
            return Message("activation", stage, action.micro_batch)
        if action.kind == "B" and stage < self.p.last:
            return Message("gradient", stage, action.micro_batch)
        return None

    def expect(self, messages: Iterator[Message]) -> None:
        """Posts the receive of the next message, if there is one."""
        message = next(messages, None)
        if message is None:
            return
        shape, like = self.p.hidden_like(self.batches[message.micro_batch])
        step = -1 if message.what == "activation" else 1
        self.p.links.expect(message, shape, like, (self.p.pp.rank + step) % self.p.pp.size)

    def run(self, action: Action) -> bool:
        """Whether a message was used up."""
        self.started = None
        if action.kind == "F":
            self._forward(action)
        elif action.kind == "B":
            self._backward(action)
        else:
            assert self.p.wgrad_queue is not None, "this schedule needs layers that queue their weight gradients"
            self.p.wgrad_queue.run()
        return self.needs(action) is not None

    def _take(self, message: Message) -> Tensor:
        arrived = self.p.links.take(message)
        self.started = time.time()
        return arrived

    def _forward(self, action: Action) -> None:
        stage, batch = self.stage(action), self.batches[action.micro_batch]
        message, module = self.needs(action), self.p.stages[action.chunk]
        hidden = None if message is None else self._take(message)
        if hidden is not None and torch.is_grad_enabled():
            hidden.requires_grad_()
        if stage == self.p.last:
            loss_sum, count = self.p.loss_step(BoundStage(module, hidden), batch)
            self.results.append((loss_sum.detach(), torch.as_tensor(count, device=loss_sum.device).detach()))
            output = loss_sum * self.factor
        else:
            output = self.p.hidden_step(module, batch, hidden)
            message = Message("activation", stage + 1, action.micro_batch)
            self.p.links.send(output.detach(), message, (self.p.pp.rank + 1) % self.p.pp.size)
        if torch.is_grad_enabled():
            self.kept[action.chunk, action.micro_batch] = hidden, output

    def _backward(self, action: Action) -> None:
        stage, message = self.stage(action), self.needs(action)
        hidden, output = self.kept.pop((action.chunk, action.micro_batch))
        torch.autograd.backward(output, None if message is None else self._take(message))
        if self.p.wgrad_queue is not None:
            self.p.wgrad_queue.end_of_pass()
        if stage > 0:
            assert hidden is not None and hidden.grad is not None, f"stage {stage} did not use its input"
            to = (self.p.pp.rank - 1) % self.p.pp.size
            self.p.links.send(hidden.grad, Message("gradient", stage - 1, action.micro_batch), to)


class BoundStage:
    """The last stage as the loss function sees it: a model that already has its input from the stage before."""

    def __init__(self, module: nn.Module, hidden: Tensor | None) -> None:
        self._module, self._hidden = module, hidden

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs, hidden=self._hidden)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _last_pass(actions: Sequence[Action], last_micro_batch: int) -> int:
    """The position from which on every gradient that comes is of the last micro-batch."""
    finishing = "W" if any(action.kind == "W" for action in actions) else "B"
    for position in range(len(actions), 0, -1):
        action = actions[position - 1]
        if action.kind in ("B", finishing) and action.micro_batch != last_micro_batch:
            return position
    return 0
