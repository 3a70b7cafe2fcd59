"""One optimizer step over one global batch, for our GPT and for any nn.Module.

The loss is the sum over tokens divided by the global number of counted tokens, so it moves neither with the
micro-batch size nor with the number of ranks. That number is known only when the whole batch has been seen; the graph
divides by the count that is expected (so fp16 does not overflow) and the gradients are corrected once at the end.

Nothing inside a step reads a number back from the device. `start_step` hands a step over; its outcome is copied to the
host while the device goes on, and read by `finish`: at once by `train_step`, on an accelerator after the next step's
passes have been handed over, so that the device always has work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron.context_parallel import slice_batch
from megatron.data_parallel import GradBuffers, broadcast_parameters
from megatron.distributed.collectives import all_gather_object, all_reduce
from megatron.distributed.state import ParallelState
from megatron.engine.routers import RouterSteps
from megatron.errors import DataError, NonFiniteError
from megatron.optimizer import REPORT_SIZE, DynamicLossScaler, Optimizer
from megatron.utils.cuda import CopyStream
from megatron.utils.timers import Timers
from megatron.utils.to_host import ToHost

Batch = Mapping[str, Any]

_FORGIVEN_OVERFLOWS = 2
"""In a row at the lowest loss scale there is: with more, no scale will help."""

# (model, batch) -> (sum of the losses over the counted tokens, number of counted tokens); both are 0-d tensors.
ForwardStep = Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    lm_loss: float
    counted_tokens: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    loss_scale: float
    grad_norm: float
    skipped: bool  # the update was left out because a gradient was not finite
    num_zeros: int | None = None
    router_losses: Mapping[str, float] = field(default_factory=dict)  # means over sequences and layers

    @property
    def finite(self) -> bool:
        return math.isfinite(self.lm_loss)


@dataclass(frozen=True)
class EvaluationResult:
    lm_loss: float
    counted_tokens: int


@dataclass(frozen=True)
class StartedStep:
    """A step that was handed over, and what is needed to finish it."""

    outcome: ToHost
    """[loss, counted tokens, zeros, the optimizer's report, losses of routers]"""
    batch_size: int
    learning_rate: float
    weight_decay: float
    counts_zeros: bool
    router_names: Sequence[str]
    micro_batches: Sequence[Batch]
    factor: float | Tensor
    """On the losses."""
    losses: Sequence[Tensor]
    """Summed, of each micro-batch."""


class Passes(Protocol):
    """How batches go through the model. What a rank without the loss (a pipeline's earlier stages) returns is empty."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """(sum of the losses, number of counted tokens)."""
        ...

    def forward_backward(
        self, batches: Sequence[Batch], factor: float | Tensor, arm: Callable[[], None]
    ) -> list[tuple[Tensor, Tensor]]:
        """The same of every batch, and the gradients of the losses' sum times `factor`. `arm` is called when only the
        last batch's gradients are still to come."""
        ...


class SinglePass:
    """The whole model is here: one batch after another."""

    def __init__(self, model: nn.Module, forward_step: ForwardStep) -> None:
        self.model, self.forward_step = model, forward_step

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss_sum, count = self.forward_step(self.model, batch)
        return loss_sum, torch.as_tensor(count, device=loss_sum.device)

    def forward_backward(
        self, batches: Sequence[Batch], factor: float | Tensor, arm: Callable[[], None]
    ) -> list[tuple[Tensor, Tensor]]:
        results = []
        for index, batch in enumerate(batches):
            if index == len(batches) - 1:
                arm()
            loss_sum, count = self.forward(batch)
            (loss_sum * factor).backward()
            results.append((loss_sum.detach(), count.detach()))
        return results


class Evaluation:
    """A model and what is computed of a batch of it, without gradients: all that an evaluation needs."""

    def __init__(
        self,
        model: nn.Module,
        forward_step: ForwardStep,
        parallel: ParallelState,
        *,
        device: torch.device,
        passes: Passes | None = None,
    ) -> None:
        """`passes`: a pipeline, where the model is cut into stages; `model` is what this rank holds."""
        self.model, self.parallel, self.device = model, parallel, device
        self.passes: Passes = passes or SinglePass(model, forward_step)
        self._copies = CopyStream(device) if device.type == "cuda" else None

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> EvaluationResult:
        """The mean loss over the counted tokens of all ranks' batches. Leaves training untouched, bit for bit."""
        was_training = self.model.training
        self.model.eval()  # no dropout: no random number is drawn
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in batches:
            result = self.passes.forward(self._to_device(batch))
            totals += self._totals([result] if result is not None else [])
        self.model.train(was_training)
        loss, counted = self._sum_over_ranks(totals).tolist()
        _check_counted(counted)
        return EvaluationResult(loss / counted, int(counted))

    def _totals(self, results: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """[summed loss, counted tokens] of this rank's batches."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        for loss_sum, count in results:
            totals += torch.stack([loss_sum.double(), count.double()])
        return totals

    def _sum_over_ranks(self, totals: Tensor) -> Tensor:
        all_reduce(totals, self.parallel.dp_cp)
        return all_reduce(totals, self.parallel.pp)  # only the last stage has any

    def _to_device(self, batch: Batch) -> Batch:
        """This rank's part of the sequences, where it computes."""
        mine = slice_batch(batch, self.parallel.cp)
        if self._copies is not None:
            return self._copies(mine)
        return {
            key: value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value
            for key, value in mine.items()
        }


class Engine(Evaluation):
    """`train_step` is the whole of training; everything around it (data, schedule, files) is the trainer's."""

    def __init__(
        self,
        model: nn.Module,
        forward_step: ForwardStep,
        grads: GradBuffers,
        optimizer: Optimizer,
        parallel: ParallelState,
        *,
        device: torch.device,
        stop_on_nonfinite: bool = True,
        buffers: Mapping[str, Tensor] | None = None,
        sum_replicas: Callable[[GradBuffers], None] | None = None,
        passes: Passes | None = None,
        routers: RouterSteps | None = None,
        timers: Timers | None = None,
    ) -> None:
        """`buffers`: the state that the model itself changes in a step, such as running means. `sum_replicas` adds up
        the gradients of parameters that ranks of one model share. `routers`: the model has experts."""
        super().__init__(model, forward_step, parallel, device=device, passes=passes)
        self.grads = grads
        self.optimizer = optimizer
        self.stop_on_nonfinite = stop_on_nonfinite
        self.buffers = dict(buffers or {})
        self.sum_replicas = sum_replicas
        self.routers = routers
        self.timers = timers or Timers()

    @property
    def asynchronous(self) -> bool:
        """Whether a step should be finished only when the next one's passes have been handed over."""
        return self.optimizer.asynchronous

    def train_step(
        self,
        micro_batches: Sequence[Batch],
        *,
        batch_size: int,
        tokens_per_sample: int,
        lr: float,
        weight_decay: float,
        count_zeros: bool = False,
    ) -> StepResult:
        """Forward and backward over this rank's micro-batches of one global batch, reduction, update."""
        started = self.start_step(
            micro_batches,
            batch_size=batch_size,
            tokens_per_sample=tokens_per_sample,
            rates=lambda: (lr, weight_decay),
            count_zeros=count_zeros,
        )
        return self.finish(started)

    def start_step(
        self,
        micro_batches: Sequence[Batch],
        *,
        batch_size: int,
        tokens_per_sample: int,
        rates: Callable[[], tuple[float, float]],
        count_zeros: bool = False,
    ) -> StartedStep:
        """Hands over everything of `train_step`. `rates` gives learning rate and weight decay when the passes have been
        handed over: the moment to finish the step before, on whose outcome they may depend."""
        expected_tokens = batch_size * tokens_per_sample
        loss_scale = self.optimizer.next_loss_scale
        factor = loss_scale / expected_tokens
        if isinstance(factor, Tensor):
            factor = factor.float()  # as a plain number would be: wider than the loss, it would widen that
        losses, totals = self._gradients(micro_batches, factor, batch_size)
        loss_sum, counted = totals.unbind()
        lr, weight_decay = rates()
        loss = loss_sum / counted
        with self.timers("optimizer"):
            zeros = self.optimizer.count_zeros() if count_zeros else torch.zeros_like(loss)
            finite = torch.isfinite(loss) if self._bad_numbers_stop else None
            scale = loss_scale * counted / expected_tokens
            update = self.optimizer.start_step(lr, weight_decay, scale, finite)
        names: Sequence[str] = ()
        router_losses = totals[:0]
        if self.routers is not None:
            names, router_losses = self.routers.end(batch_size=batch_size, updated=update[1])
        # Every rank saw other samples; the first rank's account of them is everybody's, and the checkpoint's.
        broadcast_parameters(self.buffers.items(), self.parallel.dp_cp)
        numbers = torch.stack([loss, counted, zeros.to(loss.dtype)])
        outcome = ToHost(torch.cat([numbers, update.to(loss.dtype), router_losses.to(loss.dtype)]))
        return StartedStep(outcome, batch_size, lr, weight_decay, count_zeros, names, micro_batches, factor, losses)

    def finish(self, step: StartedStep) -> StepResult:
        """What it did, once the device has done it; an error if its numbers are bad. Steps are finished in their
        order, each before the next one's update is started."""
        loss, counted, zeros, *others = step.outcome.values()
        _check_counted(counted)
        if not math.isfinite(loss) and self._bad_numbers_stop:
            raise self._nonfinite(step, f"the loss is {loss}", self._bad_samples(step.micro_batches, step.losses))
        update = self.optimizer.settle(others[:REPORT_SIZE])
        if update.skipped:
            self._check_skipped(step, update.loss_scale, update.skipped_in_a_row)
        return StepResult(
            lm_loss=loss,
            counted_tokens=int(counted),
            batch_size=step.batch_size,
            learning_rate=step.learning_rate,
            weight_decay=step.weight_decay,
            loss_scale=update.loss_scale,
            grad_norm=update.grad_norm,
            skipped=update.skipped,
            num_zeros=round(zeros) if step.counts_zeros else None,
            router_losses=dict(zip(step.router_names, others[REPORT_SIZE:], strict=True)),
        )

    def _gradients(
        self, micro_batches: Sequence[Batch], factor: float | Tensor, batch_size: int
    ) -> tuple[list[Tensor], Tensor]:
        """As `_forward_backward`, all of it summed over the ranks, the losses of the micro-batches excepted."""
        with self.timers("forward-backward"):
            losses, totals = self._forward_backward(micro_batches, factor, batch_size)
        with self.timers("all-grads-sync"):
            self.grads.reduce()
            if self.sum_replicas is not None:
                self.sum_replicas(self.grads)
            return losses, self._sum_over_ranks(totals)

    def _forward_backward(
        self, micro_batches: Sequence[Batch], factor: float | Tensor, batch_size: int
    ) -> tuple[list[Tensor], Tensor]:
        """Gradients of the summed loss times `factor`; returns the micro-batches' summed losses, and this rank's sum
        of them with its counted tokens."""
        self.model.train()
        self.grads.zero()
        batches = [self._to_device(batch) for batch in micro_batches]
        if self.routers is not None:
            self.routers.begin(batches, batch_size=batch_size, factor=factor)
        results = self.passes.forward_backward(batches, factor, self.grads.arm)
        return [loss for loss, _ in results], self._totals(results)

    # numbers that go bad

    @property
    def _bad_numbers_stop(self) -> bool:
        """A dynamic loss scale looks for its place by overflowing, so there they are no error yet."""
        return self.stop_on_nonfinite and self.optimizer.static_scale

    def _check_skipped(self, step: StartedStep, loss_scale: float, in_a_row: int) -> None:
        if self._bad_numbers_stop:
            raise self._nonfinite(step, "a gradient is not finite")
        scaler = self.optimizer.scaler
        at_the_bottom = isinstance(scaler, DynamicLossScaler) and loss_scale <= scaler.min_scale
        if self.stop_on_nonfinite and at_the_bottom and in_a_row > _FORGIVEN_OVERFLOWS:
            raise self._nonfinite(
                step, f"a gradient overflows even at the loss scale {loss_scale:g}, {in_a_row} steps in a row"
            )

    def _bad_samples(self, micro_batches: Sequence[Batch], losses: Sequence[Tensor]) -> str:
        """On which ranks, and of which samples. Every rank calls it: the loss is everybody's."""
        mine = [
            number
            for batch, loss in zip(micro_batches, losses)  # a pipeline's last stage alone has losses
            if not torch.isfinite(loss)
            for number in torch.as_tensor(batch.get("sample_ids", ())).tolist()
        ]
        parts = [
            f"rank {rank}: samples {', '.join(map(str, numbers[:8]))}{', ...' if len(numbers) > 8 else ''}"
            for rank, numbers in enumerate(all_gather_object(mine, self.parallel.world))
            if numbers
        ]
        return f" ({'; '.join(parts)})" if parts else ""

    def _first_nonfinite(self) -> str:
        """What is bad, and where: the parameters of any rank before the gradients of any. Every rank calls it, since
        the cause may lie where nobody else sees it: on one stage, or in one part of a layer."""
        weights = [name for name, p in self.model.named_parameters() if not torch.isfinite(p).all()]
        mine = ("parameters", weights) if weights else ("gradients", self.optimizer.find_nonfinite())
        found = all_gather_object(mine, self.parallel.world)
        for kind in ("parameters", "gradients"):
            ranks = {rank: names for rank, (what, names) in enumerate(found) if what == kind and names}
            if ranks:
                first, *others = ranks
                whose = f" of rank {first}" if len(found) > 1 else ""
                also = f" (and on rank{'s' if others[1:] else ''} {', '.join(map(str, others))})" if others else ""
                return f"; not finite, first in the {kind}{whose}: {', '.join(ranks[first][:4])}{also}"
        return ""

    def _nonfinite(self, step: StartedStep, what: str, where: str = "") -> NonFiniteError:
        if self.asynchronous:  # the gradients may be the next step's by now, but the weights are those of this one
            self._gradients(step.micro_batches, step.factor, step.batch_size)
        first = self._first_nonfinite()
        return NonFiniteError(
            f"{what}{where}{first}. The update was not made. Resume from the last checkpoint, lower --lr, or use "
            "--no-check-for-nan-in-loss-and-grad to skip such steps"
        )


def _check_counted(counted: float) -> None:
    if counted == 0:
        raise DataError(
            "no token of this global batch counts towards the loss: every loss mask is zero; "
            "check --eod-mask-loss and the data"
        )
