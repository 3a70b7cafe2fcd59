"""Training loop, readable from top to bottom; everything optional is a hook."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from megatron.engine import Engine, StepResult
from megatron.errors import DataError
from megatron.model.passes import Batch
from megatron.optimizer import Rates, Schedule
from megatron.training.checkpointing import RunCheckpoints
from megatron.training.evaluate import SplitEvaluator
from megatron.training.exit import StopReason
from megatron.training.hooks import Hook
from megatron.training.initialize import Run
from megatron.training.resume import Progress
from megatron.training.stopping import StopConditions
from megatron.training.training_log import Iteration, TrainingLog


class Trainer:
    def __init__(
        self,
        run: Run,
        engine: Engine,
        schedule: Schedule,
        train_batches: Iterator[Batch],
        progress: Progress,
        evaluator: SplitEvaluator,
        checkpoints: RunCheckpoints,
        hooks: Sequence[Hook],
    ) -> None:
        self.config, self.engine, self.schedule, self.batch_plan = run.config, engine, schedule, run.batch_plan
        self.train_batches, self.evaluator, self.checkpoints, self.hooks = train_batches, evaluator, checkpoints, hooks
        self.reports = TrainingLog(run, engine, hooks, progress)
        self._progress = progress  # counts started iterations; `progress` settles them first
        self._last_result: StepResult | None = None
        self.stop = StopConditions(run, later=engine.asynchronous)

    @property
    def progress(self) -> Progress:
        """Position of the run, after settling the step in flight: a skipped step does not advance the schedules."""
        self.engine.settle()
        return self._progress

    @property
    def finished(self) -> bool:
        return self.batch_plan.is_finished(self._progress.iteration, self._progress.consumed_train_samples)

    def fit(self, iterations: int | None = None) -> StopReason:
        """Trains to the last iteration or to the first reason to stop, and returns that reason. `iterations`: upper
        limit of this call."""
        config, progress, timers = self.config, self._progress, self.engine.timers
        last = None if iterations is None else progress.iteration + iterations
        reason: StopReason | None = None
        while not (self.finished or reason or progress.iteration == last):
            for hook in self.hooks:
                hook.before_iteration(progress.iteration + 1)
            started = time.perf_counter()
            timers.reset()
            batch_size = self.batch_plan.batch_size(progress.consumed_train_samples)
            with timers("batch-generator"):
                micro_batches = self._next_batches(self.batch_plan.micro_batches(batch_size))
            progress.iteration += 1
            progress.consumed_train_samples += batch_size
            iteration = Iteration(progress.iteration, progress.consumed_train_samples, started)
            if iteration.number in (config.training.iterations_to_skip or ()):
                self.engine.settle()  # keeps reports in order
                self.reports.passed_over(iteration)
            else:
                self.engine.train_step(
                    micro_batches,
                    iteration=iteration.number,
                    batch_size=batch_size,
                    tokens_per_sample=config.data.seq_length,
                    rates=self._rates,
                    then=partial(self._settled, iteration),
                    count_zeros=config.logging.log_num_zeros_in_grad,
                )
            for hook in self.hooks:
                hook.after_iteration(iteration.number)
            if self._due(config.evaluation.eval_interval) and iteration.number >= config.evaluation.start_eval_at_iter:
                self.evaluator.valid(self.progress, f"iteration {iteration.number}")
            self.checkpoints.poll()
            reason = self.stop.reason(iteration.number)
            if config.checkpoint.save and (reason or self.finished or self._due(config.checkpoint.save_interval)):
                self.checkpoints.save(self.progress)
            elif config.checkpoint.save and self._due(config.checkpoint.non_persistent_save_interval):
                self.checkpoints.save_non_persistent(self.progress)
        self.engine.settle()
        if reason or self.finished:
            self.checkpoints.finish()
        if self.finished:
            reason = StopReason("done", "all iterations are done")
        reason = reason or StopReason("paused", f"{iterations} iterations were requested")
        return replace(reason, warning=self.reports.skipped.of_the_run())

    def iterate(self, count: int = 1) -> StepResult | None:
        """Runs `count` iterations and returns the last step's result, for callers that train step by step."""
        self._last_result = None
        self.fit(count)
        return self._last_result

    def _rates(self) -> Rates:
        """Learning rate and weight decay of the step that is being started."""
        samples = self._progress.schedule_samples
        schedule = self.schedule
        return Rates(schedule.lr(samples), schedule.weight_decay(samples), schedule.decoupled_lr(samples))

    def _settled(self, iteration: Iteration, result: StepResult) -> None:
        """Records a step's outcome. The engine calls it as soon as the outcome is known."""
        if not result.skipped:
            self._progress.schedule_samples += result.batch_size
        self._last_result = result
        self.reports.step(iteration, result)

    def _next_batches(self, count: int) -> list[Batch]:
        batches = [batch for _, batch in zip(range(count), self.train_batches)]
        if len(batches) < count:
            raise DataError(
                f"the training data ended after {self._progress.consumed_train_samples} samples; "
                "train on more data, or lower --train-iters / --train-samples"
            )
        return batches

    def _due(self, interval: int | None) -> bool:
        return interval is not None and self._progress.iteration % interval == 0
