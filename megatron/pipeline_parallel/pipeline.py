"""Executes one rank's schedule: receives activations, runs its stages forward and backward, sends gradients back.

    pipeline = Pipeline(stages, state.pp, SCHEDULES["1f1b"], ...)
    results = pipeline.forward_backward(micro_batches, factor, arm)

`Pipeline` implements `Passes` for a model in several stages, as `SinglePass` does for a whole model. It is independent
of the optimizer. A stage maps a batch and the previous stage's hidden states to hidden states; the last stage maps them
to a loss.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.distributed.parallel_state import Axis
from megatron.model.passes import Batch, ForwardStep
from megatron.model.wgrads import WgradQueue
from megatron.pipeline_parallel.links import Links, Message
from megatron.pipeline_parallel.pass_recorder import PassRecorder
from megatron.pipeline_schedules import Action, Order

HiddenStep = Callable[[Any, Batch, Tensor | None], Tensor]
"""(stage, batch, the previous stage's hidden states or None on the first stage) -> this stage's hidden states."""
HiddenLike = Callable[[Batch], tuple[tuple[int, ...], Tensor]]
"""batch -> the shape of the hidden states between stages, and any tensor of their dtype and device."""


class Pipeline:
    def __init__(
        self,
        stages: Sequence[Callable[..., Tensor]],
        pp: Axis,
        schedule: Order,
        *,
        loss_step: ForwardStep,
        hidden_step: HiddenStep,
        hidden_like: HiddenLike,
        wgrad_queue: WgradQueue | None = None,
        links: Links | None = None,
        recorder: PassRecorder | None = None,
    ) -> None:
        """`stages`: this rank's stages, in the order of the model. `links`: links that are connected already, as NCCL
        requires. `recorder` receives the times of each pass."""
        self.stages, self.pp, self.schedule = list(stages), pp, schedule
        self.loss_step, self.hidden_step, self.hidden_like = loss_step, hidden_step, hidden_like
        self.wgrad_queue, self.recorder = wgrad_queue, recorder
        self.links = links or Links(pp)

    @property
    def last(self) -> int:
        """Number of the model's last stage."""
        return len(self.stages) * self.pp.size - 1

    def forward_backward(
        self, batches: Sequence[Batch], factor: float | Tensor, arm: Callable[[], None]
    ) -> list[tuple[Tensor, Tensor]]:
        """Accumulates the gradients of `factor` times the summed loss, as `Passes` describes. The rank of the last
        stage returns (loss sum, count) of every micro-batch, the others an empty list."""
        actions = self.schedule(self.pp.size, self.pp.rank, len(batches), len(self.stages))
        step = _Execution(self, batches, factor, actions)
        if self.recorder is not None:
            self.recorder.begin_step(self.pp, len(batches), len(self.stages))
        armed_at = _last_pass(actions, len(batches) - 1)
        for position, action in enumerate(actions):
            if position == armed_at:
                arm()
            started = time.time()
            step.run(action)
            if self.recorder is not None:
                self.recorder.record(action, step.started or started, time.time())
        self.links.finish()
        return step.results

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Evaluates one batch without gradients. The rank of the last stage returns (loss sum, count), the others
        None."""
        actions = [Action("F", chunk, 0) for chunk in range(len(self.stages))]
        step = _Execution(self, [batch], 1.0, actions)
        for action in actions:
            step.run(action)
        self.links.finish()
        return step.results[0] if step.results else None


class _Execution:
    """One step in progress: the activations kept for its remaining backward passes, and the losses so far.

    A receive is posted one pass before its message is used, or when the message is sent, if that is earlier. In large
    groups of the interleaved schedule, a message is sent many passes before its use.

    The time matters because the operations of a link run one after the other, and all streams of a device may share a
    hardware queue (`CUDA_DEVICE_MAX_CONNECTIONS=1`). A receive that is posted too early delays the passes that the
    previous receive depends on. A receive that is posted too late delays what follows the peer's next send.
    """

    def __init__(
        self, pipeline: Pipeline, batches: Sequence[Batch], factor: float | Tensor, actions: Sequence[Action]
    ) -> None:
        self.p, self.batches, self.factor = pipeline, batches, factor
        self.kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}  # (chunk, micro-batch): input, output
        self.results: list[tuple[Tensor, Tensor]] = []
        self.started: float | None = None  # when the last action's input arrived
        self._arrivals = self._planned_arrivals(actions)
        self._expect_during(None)

    def stage(self, action: Action) -> int:
        return action.chunk * self.p.pp.size + self.p.pp.rank

    def needs(self, action: Action) -> Message | None:
        """Message that the action takes as its input, if any."""
        stage = self.stage(action)
        if action.kind == "F" and stage > 0:
            return Message("activation", stage, action.micro_batch)
        if action.kind == "B" and stage < self.p.last:
            return Message("gradient", stage, action.micro_batch)
        return None

    def _planned_arrivals(self, actions: Sequence[Action]) -> dict[Action | None, list[Message]]:
        """Returns action -> messages whose receives are posted when it starts. Key None: before the first action."""
        arrivals: dict[Action | None, list[Message]] = defaultdict(list)
        for kind, step in (("F", -1), ("B", 1)):
            passes = [action for action in actions if action.kind == kind]
            place = {(action.chunk, action.micro_batch): number for number, action in enumerate(passes)}
            for number, action in enumerate(passes):
                message = self.needs(action)
                if message is None:
                    continue
                sent_by = (self.stage(action) + step) // self.p.pp.size  # the sender's chunk
                sent = place[sent_by, action.micro_batch] + self.p.pp.size - 1
                before = min(number - 1, sent)
                arrivals[passes[before] if before >= 0 else None].append(message)
        return arrivals

    def _expect_during(self, action: Action | None) -> None:
        """Posts the receives that `_planned_arrivals` assigns to this action."""
        for message in self._arrivals.pop(action, ()):
            shape, like = self.p.hidden_like(self.batches[message.micro_batch])
            step = -1 if message.what == "activation" else 1
            self.p.links.expect(message, shape, like, (self.p.pp.rank + step) % self.p.pp.size)

    def run(self, action: Action) -> None:
        self.started = None
        if action.kind == "F":
            self._forward(action)
        elif action.kind == "B":
            self._backward(action)
        else:
            assert self.p.wgrad_queue is not None, "a W action needs layers that queue their weight gradients"
            self.p.wgrad_queue.run()

    def _take(self, message: Message) -> Tensor:
        arrived = self.p.links.take(message)
        self.started = time.time()
        return arrived

    def _forward(self, action: Action) -> None:
        stage, batch = self.stage(action), self.batches[action.micro_batch]
        message, module = self.needs(action), self.p.stages[action.chunk]
        hidden = None if message is None else self._take(message)
        self._expect_during(action)
        if hidden is not None and torch.is_grad_enabled():
            hidden.requires_grad_()
        if stage == self.p.last:
            loss_sum, count = self.p.loss_step(BoundStage(module, hidden=hidden), batch)
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
        gradient = None if message is None else self._take(message)
        self._expect_during(action)
        torch.autograd.backward(output, gradient)
        if self.p.wgrad_queue is not None:
            self.p.wgrad_queue.end_of_pass()
        if stage > 0:
            assert hidden is not None and hidden.grad is not None, f"stage {stage} did not use its input"
            to = (self.p.pp.rank - 1) % self.p.pp.size
            self.p.links.send(hidden.grad, Message("gradient", stage - 1, action.micro_batch), to)


class BoundStage:
    """Model with some arguments bound: `stage` selects one of several stages, and `hidden` is the last stage's input. A
    forward step calls a bound stage like a whole model."""

    def __init__(self, module: Any, **arguments: Any) -> None:
        self._module, self._arguments = module, arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs, **self._arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _last_pass(actions: Sequence[Action], last_micro_batch: int) -> int:
    """Position in `actions` from which on all gradients belong to the last micro-batch."""
    finishing = "W" if any(action.kind == "W" for action in actions) else "B"
    for position in range(len(actions), 0, -1):
        action = actions[position - 1]
        if action.kind in ("B", finishing) and action.micro_batch != last_micro_batch:
            return position
    return 0
