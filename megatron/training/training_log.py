"""Reports training iterations: a record of each step for the hooks, and a log line every --log-interval."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from torch import nn

from megatron.distributed.messages import all_gather_json
from megatron.engine import Engine, StepResult
from megatron.model.flops import peak_flops
from megatron.training.hooks import Hook
from megatron.training.initialize import Run
from megatron.training.log_lines import LOG_FORMS
from megatron.training.metrics import Throughput, TrainRecord
from megatron.training.model import model_flops
from megatron.training.resume import Progress
from megatron.training.skipped_steps import SkippedSteps
from megatron.training.spiky_loss import SpikyLoss
from megatron.utils.device import accelerator_memory, device_name
from megatron.utils.process import peak_resident_bytes
from megatron.utils.timers import render_times


@dataclass(frozen=True)
class Iteration:
    """An iteration that was started."""

    number: int
    consumed_train_samples: int
    started: float
    """`time.perf_counter()` at its beginning."""


class TrainingLog:
    """Receives every iteration in order. Counts and means cover the iterations since the last logged one."""

    def __init__(self, run: Run, engine: Engine, hooks: Sequence[Hook], progress: Progress) -> None:
        self._config, self._batch_plan, self._log = run.config.logging, run.batch_plan, run.log
        self._engine, self._hooks, self._throughput = engine, hooks, _throughput(run, engine.model)
        done, consumed = progress.iteration, progress.consumed_train_samples
        self.total_iterations = done + self._batch_plan.iterations_left(done, consumed)
        self._last_told = time.perf_counter()
        self._since_logged: list[tuple[float, int, float, float]] = []  # loss, samples, seconds, waits for data
        self._slow = 1  # iterations left out of the ETA: the first one of a run allocates and compiles
        self._skipped = self._not_finite = 0
        self.skipped = SkippedSteps()
        training = run.config.training
        self._spiky = SpikyLoss(training.spiky_loss_factor) if training.check_for_spiky_loss else None

    def passed_over(self, iteration: Iteration) -> None:
        self._skipped += 1
        self._log.info(f" iteration {iteration.number}: data consumed without a step (--iterations-to-skip)")

    def step(self, iteration: Iteration, result: StepResult) -> None:
        now = time.perf_counter()
        seconds, self._last_told = now - max(iteration.started, self._last_told), now
        self._since_logged.append((result.lm_loss, result.batch_size, seconds, result.times["batch-generator"]))
        self._skipped += result.skipped
        self.skipped.count(result.skipped, result.loss_scale)
        self._not_finite += not result.finite
        if self._spiky is not None:
            last = iteration.consumed_train_samples - 1
            rise = self._spiky.check(result.lm_loss, iteration.number, last - result.batch_size + 1, last)
            if rise:
                self._log.warn(rise)
        config = self._config
        is_logged = iteration.number % config.log_interval == 0
        is_drawn = config.tensorboard_dir is not None and iteration.number % config.tensorboard_log_interval == 0
        if not (is_logged or is_drawn or self._hooks):
            return
        reported = dict(result.reported)
        if config.log_params_norm and (is_logged or is_drawn):  # a collective, so all ranks must decide alike
            reported["params_norm"] = self._engine.optimizer.params_norm().item()
        record = self._record(iteration, result, reported)
        for hook in self._hooks:
            hook.on_step(record, result.times)
        if is_logged:
            for hook in self._hooks:
                hook.on_log(record)
            self._log.info(LOG_FORMS[config.log_format].train(record, datetime.now()))
            if warning := self.skipped.since_last_asked():
                self._log.warn(warning)
            self._log_times(result.times)
            self._log_memory(iteration.number)
            self._since_logged.clear()
            self._slow = 0
            self._skipped = self._not_finite = 0

    def _log_times(self, mine: Mapping[str, float]) -> None:
        """Logs the times of an iteration's phases over all ranks, a collective. A no-op at --timing-log-level 0."""
        config = self._config
        if config.timing_log_level > 0:
            times = all_gather_json(dict(mine), self._engine.parallel.world, dict[str, float])
            self._log.info(*render_times(times, config.timing_log_option).split("\n"))

    def _log_memory(self, iteration: int) -> None:
        """Logs the memory of the rank that uses most, with a collective. A no-op without --log-memory-interval."""
        config = self._config
        if config.log_memory_interval is None or iteration % config.log_memory_interval:
            return
        mine = accelerator_memory(self._engine.device) or {"peak_resident": peak_resident_bytes()}
        ranks = all_gather_json(mine, self._engine.parallel.world, dict[str, int])
        most = {kind: max(range(len(ranks)), key=lambda rank: ranks[rank][kind]) for kind in mine}
        sizes = [f"{kind.replace('_', ' ')} {ranks[rank][kind] / 1e6:.1f} (rank {rank})" for kind, rank in most.items()]
        self._log.info(f" memory after iteration {iteration} (MB, the rank that uses most): {' | '.join(sizes)}")

    def _record(self, iteration: Iteration, result: StepResult, reported: Mapping[str, float]) -> TrainRecord:
        losses, samples, seconds, waited = zip(*self._since_logged, strict=True)
        rates = self._throughput.rates(sum(samples), sum(seconds))
        usual = self._slow if len(samples) > 1 else 0
        samples_left = self._batch_plan.samples_left(iteration.number, iteration.consumed_train_samples)
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
            skipped_iterations=self._skipped,
            nan_iterations=self._not_finite,
            seconds_per_iteration=sum(seconds) / len(seconds),
            data_wait_seconds=sum(waited) / len(waited),
            tokens_per_second=rates.tokens_per_second,
            samples_per_second=rates.samples_per_second,
            tflops_per_device=rates.tflops_per_device,
            model_flops_utilisation=rates.utilisation,
            eta_seconds=samples_left * sum(seconds[usual:]) / sum(samples[usual:]),
            reported=reported,
        )


def _throughput(run: Run, model: nn.Module) -> Throughput:
    return Throughput(
        seq_length=run.config.data.seq_length,
        world_size=run.launch.world_size,
        flops_per_token=model_flops(run, model),
        peak_flops=peak_flops(device_name(run.device), run.config.precision.params_dtype),
    )
