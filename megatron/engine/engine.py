"""Runs one optimizer step over one global batch, for the package's GPT and for any nn.Module.

The loss is the sum over tokens divided by the global number of counted tokens. It therefore does not depend on the
micro-batch size or the number of ranks. The counted number is known only after the whole batch. The backward pass
divides by the expected number (so that fp16 does not overflow), and the gradients are corrected once at the end.

Steps are asynchronous on an accelerator: the host reads no number back while it launches a step. The outcome is copied
to the host meanwhile, and is read once the next step's passes are launched, so that the device always has work. Any
access to the model's state between steps first waits for the step in flight (`settle`).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.data_parallel import TrainingStore, broadcast_parameters
from megatron.distributed.messages import all_gather_json
from megatron.distributed.parallel_state import ParallelState
from megatron.engine.evaluation import Evaluation, EvaluationResult, check_counted, sum_over_ranks, totals_of
from megatron.engine.nonfinite import first_nonfinite, overflows_at_the_bottom
from megatron.engine.reports import StepReports
from megatron.engine.routers import RouterSteps
from megatron.engine.to_device import ToDevice
from megatron.errors import NonFiniteError
from megatron.model.gpt import GPT
from megatron.model.passes import Batch, Passes
from megatron.optimizer import REPORT_SIZE, Optimizer, Rates
from megatron.parallelize import Parallel, ReplicaSums, persistent_buffers
from megatron.utils.device import ToHost
from megatron.utils.timers import Timers

_MOST_NAMED = 8
"""Largest number of ranks whose samples a message lists."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    lm_loss: float
    counted_tokens: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    loss_scale: float
    grad_norm: float
    skipped: bool  # no update, because a gradient was not finite
    reported: Mapping[str, float] = field(default_factory=dict)
    """Numbers passed to `Engine.report`, by name: zeros in gradients, losses of routers."""
    times: Mapping[str, float] = field(default_factory=dict, compare=False, repr=False)  # seconds per phase, this rank

    @property
    def finite(self) -> bool:
        return math.isfinite(self.lm_loss)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A launched step, and what is needed to settle it."""

    iteration: int
    then: Callable[[StepResult], None]
    outcome: ToHost
    """[loss, counted tokens, the optimizer's report, the reported numbers]"""
    batch_size: int
    learning_rate: float
    weight_decay: float
    reported: Sequence[str]
    times: Mapping[str, float]
    micro_batches: Sequence[Batch]
    factor: float | Tensor
    """Factor on the losses."""
    losses: Sequence[Tensor]
    """Summed loss of each micro-batch."""


class Engine:
    """Runs training steps (`train_step`). Data, schedule and files belong to the trainer."""

    def __init__(
        self,
        built: Parallel,
        passes: Passes,
        store: TrainingStore,
        optimizer: Optimizer,
        parallel: ParallelState,
        *,
        device: torch.device,
        stop_on_nonfinite: bool,
    ) -> None:
        self.model, self.divided, self.passes = built.model, built.divided, passes
        self.parallel, self.device = parallel, device
        self.evaluation = Evaluation(built.model, passes, parallel, device=device, divided=built.divided)
        self.whole_weights = self.evaluation.whole_weights
        self.store = store
        self.stop_on_nonfinite = stop_on_nonfinite
        self.buffers = persistent_buffers(built.model)  # a forward pass changes them: running means, say
        self.sum_replicas: Callable[[TrainingStore], None] = ReplicaSums(built.specs, parallel)
        self.routers: RouterSteps | None = None
        if isinstance(built.model, GPT) and built.model.routers is not None:
            self.routers = RouterSteps(built.model, parallel, device)
        self.timers = Timers()
        self._reports = StepReports(parallel.world)
        self.report = self._reports.report
        self._to_device = ToDevice(device, parallel.cp)
        self._optimizer = optimizer
        self._in_flight: _Step | None = None

    @property
    def asynchronous(self) -> bool:
        """True if a step is settled only after the next one's passes have been launched."""
        return self._optimizer.asynchronous

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer, with counters and loss scale after every started step."""
        self.settle()
        return self._optimizer

    def train_step(
        self,
        micro_batches: Sequence[Batch],
        *,
        iteration: int,
        batch_size: int,
        tokens_per_sample: int,
        rates: Callable[[], Rates],
        then: Callable[[StepResult], None],
        count_zeros: bool = False,
    ) -> None:
        """Runs forward and backward over this rank's micro-batches of one global batch, reduces, and updates. The
        function `rates` returns learning rates and weight decay. It is called after the previous step has been settled,
        because the rates may depend on whether that step was skipped. The function `then` receives the step's result
        when it is settled: before this method returns, or if the engine is asynchronous, during the next step or in
        `settle`. The number `iteration` is for messages.
        """
        self._reports.clear()
        expected_tokens = batch_size * tokens_per_sample
        loss_scale = self._optimizer.next_loss_scale
        factor = loss_scale / expected_tokens
        if isinstance(factor, Tensor):
            factor = factor.float()  # a wider tensor would widen the loss
        losses, totals = self._gradients(micro_batches, factor, batch_size)
        loss_sum, counted = totals.unbind()
        self._settle_step()
        now = rates()
        loss = loss_sum / counted
        with self.timers("optimizer"):
            if count_zeros:
                self.report("num_zeros", self._optimizer.count_zeros())
            finite = torch.isfinite(loss) if self._bad_numbers_stop else None
            scale = loss_scale * counted / expected_tokens
            update = self._optimizer.start_step(now, scale, finite)
        if self.routers is not None:
            for name, mean in self.routers.end(batch_size=batch_size, updated=update[1]).items():
                self.report(name, mean)
        reported = self._reports.take()
        # Data-parallel ranks saw different samples, so their buffers differ; rank 0's are used and saved.
        broadcast_parameters(self.buffers.items(), self.parallel.dp_cp)
        numbers = [torch.stack([loss, counted]), update.to(loss.dtype), *(one.view(1) for one in reported.values())]
        self._in_flight = _Step(
            iteration=iteration,
            then=then,
            outcome=ToHost(torch.cat(numbers)),
            batch_size=batch_size,
            learning_rate=now.lr,
            weight_decay=now.weight_decay,
            reported=tuple(reported),
            times=self.timers.elapsed(),
            micro_batches=micro_batches,
            factor=factor,
            losses=losses,
        )
        if not self.asynchronous:
            self._settle_step()

    def settle(self) -> None:
        """Waits for the step in flight, if there is one, and passes its result on. Raises if a non-finite loss or
        gradient ends the run. Afterwards the weights are complete."""
        self._settle_step()
        self.store.wait_for_weights()

    def _settle_step(self) -> None:
        step, self._in_flight = self._in_flight, None
        if step is not None:
            step.then(self._result(step))

    def evaluate(self, batches: Iterable[Batch], byte_lengths: Tensor | None = None) -> EvaluationResult:
        """Mean loss over the batches, after the step in flight."""
        self.settle()
        return self.evaluation.evaluate(batches, byte_lengths)

    def _result(self, step: _Step) -> StepResult:
        with self.parallel.comm_log.read_back(f"reading the outcome of step {step.iteration}"):
            loss, counted, *others = step.outcome.values()
        check_counted(counted)
        if not math.isfinite(loss) and self._bad_numbers_stop:
            raise self._nonfinite(step, f"the loss is {loss}", self._bad_samples(step.micro_batches, step.losses))
        update = self._optimizer.settle(others[:REPORT_SIZE])
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
            reported=dict(zip(step.reported, others[REPORT_SIZE:], strict=True)),
            times=step.times,
        )

    def _gradients(
        self, micro_batches: Sequence[Batch], factor: float | Tensor, batch_size: int
    ) -> tuple[list[Tensor], Tensor]:
        """Computes gradients of the summed loss times `factor`, summed over the ranks. Returns this rank's loss of each
        micro-batch, and all ranks' [summed loss, counted tokens]."""
        with self.timers("forward-backward"):
            self.model.train()
            self.store.zero()
            batches = [self._to_device(batch) for batch in micro_batches]
            if self.routers is not None:
                self.routers.begin(batches, batch_size=batch_size, factor=factor)
            results = self.passes.forward_backward(batches, factor, self.store.arm)
            totals = totals_of(results, self.device)
        with self.timers("all-grads-sync"):
            self.store.reduce()
            self.sum_replicas(self.store)
            return [loss for loss, _ in results], self._sum_over_ranks(totals)

    def _sum_over_ranks(self, totals: Tensor) -> Tensor:
        return sum_over_ranks(totals, self.parallel)

    # ---- numbers that are not finite

    @property
    def _bad_numbers_stop(self) -> bool:
        """True if non-finite numbers end the run; with a dynamic loss scale overflows are expected."""
        return self.stop_on_nonfinite and self._optimizer.static_scale

    def _check_skipped(self, step: _Step, loss_scale: float, in_a_row: int) -> None:
        if self._bad_numbers_stop:
            raise self._nonfinite(step, "a gradient is not finite", self._samples(step.micro_batches))
        if self.stop_on_nonfinite:
            what = overflows_at_the_bottom(self._optimizer, loss_scale, in_a_row)
            if what is not None:
                raise self._nonfinite(step, what)

    def _bad_samples(self, micro_batches: Sequence[Batch], losses: Sequence[Tensor]) -> str:
        """Lists the samples whose loss is not finite, by rank. A collective: all ranks have the same loss."""
        mine = tuple(
            number
            for batch, loss in zip(micro_batches, losses)  # only a pipeline's last stage has losses
            if not torch.isfinite(loss)
            for number in torch.as_tensor(batch.get("sample_ids", ())).tolist()
        )
        parts = [
            f"rank {rank}: samples {', '.join(map(str, numbers[:8]))}{', ...' if len(numbers) > 8 else ''}"
            for rank, numbers in enumerate(all_gather_json(mine, self.parallel.world, tuple[int, ...]))
            if numbers
        ]
        more = f"; and {len(parts) - _MOST_NAMED} other ranks" if len(parts) > _MOST_NAMED else ""
        return f" ({'; '.join(parts[:_MOST_NAMED])}{more})" if parts else ""

    def _samples(self, micro_batches: Sequence[Batch]) -> str:
        """Formats the range of a step's samples, for a gradient that is not finite: any sample may be the cause."""
        mine = [n for batch in micro_batches for n in torch.as_tensor(batch.get("sample_ids", ())).tolist()]
        numbers = [n for theirs in all_gather_json(mine, self.parallel.world, list[int]) for n in theirs]
        return f" (in samples {min(numbers)} to {max(numbers)})" if numbers else ""

    def _nonfinite(self, step: _Step, what: str, where: str = "") -> NonFiniteError:
        if self.asynchronous:  # the gradients may be the next step's by now, but the weights are still this step's
            self._reports.clear()
            with torch.enable_grad():
                self._gradients(step.micro_batches, step.factor, step.batch_size)
        first = first_nonfinite(self._optimizer, self.parallel)
        first = f"; {first}" if first else ""
        return NonFiniteError(
            f"iteration {step.iteration}: {what}{where}{first}. The update was not made. Resume from the last "
            "checkpoint, lower --lr, or use --no-check-for-nan-in-loss-and-grad to skip such steps"
        )
