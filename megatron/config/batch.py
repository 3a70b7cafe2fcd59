"""Samples per step and steps per run: pure arithmetic on the configuration."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from megatron.config.run import RunConfig
from megatron.errors import ConfigError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_schedule(words: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Parses '0:384 200B:768' into pairs (consumed tokens, global batch size from that point)."""
    given = f"--step-batch-size-schedule {' '.join(words)}"
    steps = []
    for entry in " ".join(words).split():
        match = re.fullmatch(r"([0-9]{1,15})([KMBT]?):([1-9][0-9]{0,8})", entry)
        if match is None:
            raise ConfigError(f"{given}: {entry} is not TOKENS:SIZE, as in 200B:768")
        steps.append((int(match[1]) * _UNITS[match[2]], int(match[3])))
    if not steps or steps[0][0] != 0 or any(one >= other for (one, _), (other, _) in pairwise(steps)):
        raise ConfigError(f"{given}: not a schedule; begin with 0:SIZE and use increasing TOKENS, as in 0:384 200B:768")
    return tuple(steps)


@dataclass(frozen=True)
class BatchPlan:
    """Batch sizes and iterations of a run on `dp` data-parallel ranks. Samples are counted over all ranks."""

    config: RunConfig
    dp: int

    @staticmethod
    def on(config: RunConfig, world_size: int) -> "BatchPlan":
        """Returns the plan for `world_size` ranks, which must be a multiple of the model-parallel size."""
        return BatchPlan(config, world_size // config.parallel.model_parallel_size)

    @cached_property
    def _scheduled(self) -> tuple[tuple[int, int], ...]:
        """Pairs (consumed samples, batch size from that point) of --step-batch-size-schedule; empty without it."""
        words, length = self.config.training.step_batch_size_schedule, self.config.data.seq_length
        return () if words is None else tuple((-(-tokens // length), size) for tokens, size in parse_schedule(words))

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Sizes to check: the final one, those of a schedule, and a ramp-up's first size and increment."""
        ramp = self.config.training.rampup_batch_size or ()
        return (self.final_batch_size, *ramp[:2], *(size for _, size in self._scheduled))

    @property
    def micro_batch_size(self) -> int:
        """--micro-batch-size. If unset: the samples per rank and step, divided by --gradient-accumulation-steps."""
        training = self.config.training
        if training.micro_batch_size:
            return training.micro_batch_size
        return (training.global_batch_size or 0) // (self.dp * (training.gradient_accumulation_steps or 1))

    @property
    def evaluation_batch_size(self) -> int:
        return self.config.evaluation.eval_global_batch_size or self.final_batch_size

    @property
    def evaluation_micro_batch_size(self) -> int:
        return self.config.evaluation.eval_micro_batch_size or self.micro_batch_size

    @property
    def final_batch_size(self) -> int:
        """Samples per step at the end of the ramp-up or schedule, if there is one."""
        training = self.config.training
        if self._scheduled:
            return self._scheduled[-1][1]
        if training.global_batch_size is not None:
            return training.global_batch_size
        return training.micro_batch_size * self.dp * (training.gradient_accumulation_steps or 1)

    def batch_size(self, consumed: int) -> int:
        """Returns the samples of the step that starts after `consumed` samples.

        As in Megatron, all increments of a ramp-up last for the same number of samples. This number is computed in
        floating point, so that the batch size changes at the same sample as in Megatron.
        """
        if self._scheduled:
            return [size for start, size in self._scheduled if start <= consumed][-1]
        final = self.final_batch_size
        ramp = self.config.training.rampup_batch_size
        if ramp is None:
            return final
        start, increment, ramp_samples = ramp
        increments = (final - start) // increment
        if increments == 0 or ramp_samples == 0 or consumed > ramp_samples:
            return final
        steps = int(consumed / (ramp_samples / increments))
        return start + steps * increment

    def micro_batches(self, batch_size: int) -> int:
        """Micro-batches per rank and step."""
        return batch_size // (self.micro_batch_size * self.dp)

    @property
    def evaluation_micro_batches(self) -> int:
        """Micro-batches per rank in one global batch of an evaluation."""
        return self.evaluation_batch_size // (self.evaluation_micro_batch_size * self.dp)

    @property
    def total_iterations(self) -> int:
        """Iterations from iteration 0 to the end. A resumed run uses `iterations_left`, because its earlier
        steps may have had another batch size."""
        return self.iterations_left(0, 0)

    @property
    def train_samples(self) -> int:
        """Samples that the whole run requests from the dataset."""
        training = self.config.training
        if training.train_samples is not None:
            return training.train_samples
        return (training.train_iters or 0) * self.final_batch_size

    def samples_after(self, iterations: int) -> int:
        """Returns the samples that the first `iterations` iterations of a run consume."""
        consumed, left = 0, iterations
        for (_, size), (end, _) in pairwise(self._scheduled):
            steps = min(left, max(0, -(-(end - consumed) // size)))
            consumed, left = consumed + steps * size, left - steps
        ramp_end = self.config.training.rampup_batch_size[2] if self.config.training.rampup_batch_size else -1
        while left and consumed <= ramp_end:
            consumed, left = consumed + self.batch_size(consumed), left - 1
        return consumed + left * self.final_batch_size

    def schedule_samples_after(self, iterations: int) -> int:
        """Returns the learning-rate schedule's position in samples. Iterations of --iterations-to-skip do not count."""
        skipped = {n for n in self.config.training.iterations_to_skip or () if 0 < n <= iterations}
        passed_over = sum(self.batch_size(self.samples_after(n - 1)) for n in skipped)
        return self.samples_after(iterations) - passed_over

    def is_finished(self, iteration: int, consumed: int) -> bool:
        """Returns True at the end of the run. As in Megatron, an incomplete last batch is not trained."""
        training = self.config.training
        if training.train_iters is not None:
            return iteration >= training.train_iters
        return consumed + self.batch_size(consumed) > (training.train_samples or 0)

    def iterations_left(self, iteration: int, consumed: int) -> int:
        training = self.config.training
        if training.train_iters is not None:
            return max(0, training.train_iters - iteration)
        left = 0
        for (_, size), (end, _) in pairwise(self._scheduled):
            to_the_end, that_fit = -(-(end - consumed) // size), ((training.train_samples or 0) - consumed) // size
            if to_the_end > that_fit:
                return left + max(0, that_fit)
            left += max(0, to_the_end)
            consumed += max(0, to_the_end) * size
        ramp_end = training.rampup_batch_size[2] if training.rampup_batch_size is not None else -1
        while consumed <= ramp_end and not self.is_finished(iteration, consumed):
            consumed += self.batch_size(consumed)
            left += 1
        return left + max(0, (training.train_samples or 0) - consumed) // self.final_batch_size

    def samples_left(self, iteration: int, consumed: int) -> int:
        training = self.config.training
        if training.train_iters is not None:
            return self.iterations_left(iteration, consumed) * self.final_batch_size
        return max(0, (training.train_samples or 0) - consumed)
