"""The training loop. It reads top to bottom; whatever is optional is a hook.

On an accelerator an iteration is settled (its outcome read, counted and reported) while the next one is computed.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from megatron.config import RunConfig
from megatron.distributed.collectives import all_gather_object
from megatron.engine import Batch, Engine, StartedStep, StepResult
from megatron.errors import DataError, NonFiniteError
from megatron.optimizer import Schedule
from megatron.training.batch_plan import BatchPlan
from megatron.training.exit_reason import StopReason
from megatron.training.hooks import Hook
from megatron.training.metrics import EvalRecord, TrainRecord
from megatron.training.profiling import NoProfiling, Profiling
from megatron.training.progress import Progress
from megatron.training.stopping import StopConditions
from megatron.training.throughput import Throughput
from megatron.utils.log import RankLog
from megatron.utils.timers import render_times


class Saver(Protocol):
    """Writes a checkpoint of the whole run at a step boundary."""

    def save(self, progress: Progress) -> None: ...


class Evaluator(Protocol):
    """Evaluates one split and reports; moves `consumed_valid_samples`."""

    def valid(self, progress: Progress, where: str) -> EvalRecord | None: ...

    def test(self, progress: Progress, where: str) -> EvalRecord | None: ...


@dataclass(frozen=True)
class Iteration:
    """One that was handed over."""

    step: StartedStep
    number: int
    consumed_train_samples: int
    batch_size: int
    started: float
    times: dict[str, float]


class Trainer:
    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        schedule: Schedule,
        batch_plan: BatchPlan,
        train_batches: Iterator[Batch],
        *,
        progress: Progress,
        throughput: Throughput,
        evaluator: Evaluator,
        saver: Saver | None,
        stop: StopConditions,
        hooks: Sequence[Hook],
        log: RankLog,
        check_replicas: Callable[[int], None] | None = None,
        profiling: Profiling | None = None,
    ) -> None:
        self.config, self.engine, self.schedule, self.batch_plan = config, engine, schedule, batch_plan
        self.train_batches, self.progress, self.throughput = train_batches, progress, throughput
        self.evaluator, self.saver, self.stop, self.hooks, self.log = evaluator, saver, stop, hooks, log
        self.timers = engine.timers
        self.check_replicas, self.profiling = check_replicas, profiling or NoProfiling()
        self.total_iterations = progress.iteration + batch_plan.iterations_left(
            progress.iteration, progress.consumed_train_samples
        )
        self._under_way: Iteration | None = None
        self._settled = time.perf_counter()
        self._since_log: list[tuple[float, int, float, float]] = []  # loss, samples, seconds, of these for data

    def fit(self) -> StopReason:
        """Train to the last iteration or to the first reason to stop; returns that reason."""
        with automatic_garbage_collection(not self.config.training.manual_gc):
            return self._fit()

    def _fit(self) -> StopReason:
        while not self.finished:
            self._collect_garbage_on_schedule()
            with self.profiling(self.progress.iteration + 1):
                self._one_iteration()
            if self.check_replicas is not None and self._due(self.config.parallel.check_replicas_every):
                self._settle()
                self.check_replicas(self.progress.iteration)
            if self._due(self.config.evaluation.eval_interval):
                self._settle()
                self._evaluate()
            reason = self.stop.reason(self.progress.iteration)
            if self.saver and (reason or self.finished or self._due(self.config.checkpoint.save_interval)):
                self._settle()
                self.saver.save(self.progress)
            if reason and not self.finished:
                self._settle()
                return reason
        self._settle()
        return StopReason("done", "all iterations are done")

    def iterate(self, count: int = 1) -> StepResult | None:
        """So many iterations, and what the last one did once it is settled; for those who look on step by step."""
        result = None
        for _ in range(count):
            result = self._one_iteration()
        return self._settle() or result

    @property
    def finished(self) -> bool:
        return self.batch_plan.is_finished(self.progress.iteration, self.progress.consumed_train_samples)

    # one iteration

    def _one_iteration(self) -> StepResult | None:
        """One global batch; None when the user asked to pass over this iteration's data, or on an accelerator."""
        started = time.perf_counter()
        self.timers.reset()
        progress = self.progress
        batch_size = self.batch_plan.batch_size(progress.consumed_train_samples)
        with self.timers("batch-generator"):
            micro_batches = self._next_batches(self.batch_plan.micro_batches(batch_size))
        progress.iteration += 1
        progress.consumed_train_samples += batch_size
        if progress.iteration in (self.config.training.iterations_to_skip or ()):
            self._settle()
            progress.skipped_iterations += 1
            self.log.info(f" iteration {progress.iteration}: data consumed without a step (--iterations-to-skip)")
            return None
        step = self.engine.start_step(
            micro_batches,
            batch_size=batch_size,
            tokens_per_sample=self.config.data.seq_length,
            rates=self._rates,
            count_zeros=self.config.logging.log_num_zeros_in_grad,
        )
        self._under_way = Iteration(
            step, progress.iteration, progress.consumed_train_samples, batch_size, started, self.timers.elapsed()
        )
        return None if self.engine.asynchronous else self._settle()

    def _rates(self) -> tuple[float, float]:
        """Learning rate and weight decay of the step that is being started."""
        self._settle()  # one that was skipped does not move the schedules
        samples = self.progress.schedule_samples
        return self.schedule.lr(samples), self.schedule.weight_decay(samples)

    def _settle(self) -> StepResult | None:
        """Counts and reports the iteration under way, if there is one, as soon as its outcome is here."""
        iteration, self._under_way = self._under_way, None
        if iteration is None:
            return None
        try:
            result = self.engine.finish(iteration.step)
        except NonFiniteError as error:
            raise NonFiniteError(f"iteration {iteration.number}: {error}") from error
        if result.skipped:
            self.progress.skipped_iterations += 1
        else:
            self.progress.schedule_samples += result.batch_size
        if not result.finite:
            self.progress.nan_iterations += 1
        self._report(result, iteration)
        return result

    def _next_batches(self, count: int) -> list[Batch]:
        batches = [batch for _, batch in zip(range(count), self.train_batches)]
        if len(batches) < count:
            raise DataError(
                f"the training data ended after {self.progress.consumed_train_samples} samples; "
                "train on more data, or lower --train-iters / --train-samples"
            )
        return batches

    def _evaluate(self) -> None:
        training = self.config.training
        self.evaluator.valid(self.progress, f"iteration {self.progress.iteration}")
        if training.manual_gc and training.manual_gc_eval:
            gc.collect()

    # reporting

    def _report(self, result: StepResult, iteration: Iteration) -> None:
        now = time.perf_counter()
        seconds, self._settled = now - max(iteration.started, self._settled), now
        self._since_log.append((result.lm_loss, result.batch_size, seconds, iteration.times["batch-generator"]))
        logging = self.config.logging
        is_due = iteration.number % logging.log_interval == 0
        for_tensorboard = (
            logging.tensorboard_dir is not None and iteration.number % logging.tensorboard_log_interval == 0
        )
        if not is_due and not for_tensorboard:  # decided alike on every rank: norms are collectives
            return
        record = self._record(result, iteration)
        for hook in self.hooks:
            hook.on_step(record, iteration.times)
        if is_due:
            for hook in self.hooks:
                hook.on_log(record)
            self.log.info(record.line())
            self._report_times(iteration.times)
            self._since_log.clear()
            self.progress.skipped_iterations = self.progress.nan_iterations = 0

    def _report_times(self, mine: dict[str, float]) -> None:
        """An iteration's parts, over all ranks; a collective, so only when asked for."""
        logging = self.config.logging
        if logging.timing_log_level > 0:
            times = all_gather_object(mine, self.engine.parallel.world)
            self.log.info(render_times(times, logging.timing_log_option))

    def _record(self, result: StepResult, iteration: Iteration) -> TrainRecord:
        progress = self.progress
        losses, samples, seconds, waited = zip(*self._since_log, strict=True)
        rates = self.throughput.rates(sum(samples), sum(seconds))
        samples_left = self.batch_plan.samples_left(iteration.number, iteration.consumed_train_samples)
        return TrainRecord(
            iteration=iteration.number,
            total_iterations=self.total_iterations,
            consumed_train_samples=iteration.consumed_train_samples,
            learning_rate=result.learning_rate,
            weight_decay=result.weight_decay,
            global_batch_size=result.batch_size,
            lm_loss=result.lm_loss,
            mean_lm_loss=sum(losses) / len(losses),
            loss_scale=result.loss_scale,
            grad_norm=result.grad_norm,
            num_zeros=result.num_zeros,
            params_norm=self.engine.optimizer.params_norm() if self.config.logging.log_params_norm else None,
            load_balancing_loss=result.router_losses.get("load_balancing_loss"),
            z_loss=result.router_losses.get("z_loss"),
            skipped_iterations=progress.skipped_iterations,
            nan_iterations=progress.nan_iterations,
            seconds_per_iteration=sum(seconds) / len(seconds),
            data_wait_seconds=sum(waited) / len(waited),
            tokens_per_second=rates.tokens_per_second,
            samples_per_second=rates.samples_per_second,
            tflops_per_device=rates.tflops_per_device,
            model_flops_utilisation=rates.utilisation,
            eta_seconds=samples_left / rates.samples_per_second,
        )

    def _due(self, interval: int | None) -> bool:
        return interval is not None and self.progress.iteration % interval == 0

    def _collect_garbage_on_schedule(self) -> None:
        training = self.config.training
        if training.manual_gc and training.manual_gc_interval and self._due(training.manual_gc_interval):
            gc.collect()


@contextmanager
def automatic_garbage_collection(wanted: bool) -> Iterator[None]:
    """Off under --manual-gc: a collection at a moment of Python's choosing delays one rank, and so all of them."""
    was_enabled = gc.isenabled()
    if not wanted:
        gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
