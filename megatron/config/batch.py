"""How many samples a step takes, and how many steps a run has. Pure arithmetic on the configuration."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from megatron.config.run import RunConfig
from megatron.errors import ConfigError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_schedule(words: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Parses '0:384 200B:768' into (tokens, batch size from so many consumed tokens on)."""
    given = f"--step-batch-size-schedule {' '.join(words)}"
    steps = []
    for entry in " ".join(words).split():
        match = re.fullmatch(r"([0-9]{1,15})([KMBT]?):([1-9][0-9]{0,8})", entry)
        if match is None:
            raise ConfigError(f"{given}: {entry} is not TOKENS:SIZE, as in 200B:768")
        steps.append((int(match[1]) * _UNITS[match[2]], int(match[3])))
    if not steps or steps[0][0] != 0 or any(one >= other for (one, _), (other, _) in pairwise(steps)):
        raise ConfigError(f"{given}: begin with 0:SIZE and let the tokens grow, as in 0:384 200B:768")
    return tuple(steps)


@dataclass(frozen=True)
class BatchPlan:
    """The batch sizes of a run on `dp` data-parallel ranks. Steps and samples are those of all ranks together."""

    config: RunConfig
    dp: int

    @staticmethod
    def on(config: RunConfig, world_size: int) -> "BatchPlan":
        """`check_world` has checked that the division is exact."""
        return BatchPlan(config, world_size // config.parallel.model_parallel_size)

    @cached_property
    def _scheduled(self) -> tuple[tuple[int, int], ...]:
        """(samples, batch size from so many on) of --step-batch-size-schedule; () without one."""
        words, length = self.config.training.step_batch_size_schedule, self.config.data.seq_length
        return () if words is None else tuple((-(-tokens // length), size) for tokens, size in parse_schedule(words))

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes that steps of the run have. A ramp-up is described by its first size and its increment."""
        ramp = self.config.training.rampup_batch_size or ()
        return (self.final_batch_size, *ramp[:2], *(size for _, size in self._scheduled))

    @property
    def micro_batch_size(self) -> int:
        """--micro-batch-size; without it, a rank's share of the step in equal parts."""
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
        """Samples per step once a ramp-up or a schedule, if any, is over."""
        training = self.config.training
        if self._scheduled:
            return self._scheduled[-1][1]
        if training.global_batch_size is not None:
            return training.global_batch_size
        return training.micro_batch_size * self.dp * (training.gradient_accumulation_steps or 1)

    def batch_size(self, consumed: int) -> int:
        """Samples of the step that starts after `consumed` samples.

        As in Megatron every increment takes an equal share of the ramp's samples, computed in floating point so that
        the batch size changes at the same sample.
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
        """The number of micro-batches of one rank in a step."""
        return batch_size // (self.micro_batch_size * self.dp)

    @property
    def evaluation_micro_batches(self) -> int:
        """The number of micro-batches of one rank in one global batch of an evaluation."""
        return self.evaluation_batch_size // (self.evaluation_micro_batch_size * self.dp)

    @property
    def total_iterations(self) -> int:
        """The number of iterations of a run from its beginning. A resumed run uses `iterations_left`, because its
        earlier steps may have had another batch size."""
        return self.iterations_left(0, 0)

    @property
    def train_samples(self) -> int:
        """Samples that the whole run asks of the dataset."""
        training = self.config.training
        if training.train_samples is not None:
            return training.train_samples
        return (training.train_iters or 0) * self.final_batch_size

    def samples_after(self, iterations: int) -> int:
        """Samples that the first so many iterations of a run consume."""
        consumed, left = 0, iterations
        for (_, size), (end, _) in pairwise(self._scheduled):
            steps = min(left, max(0, -(-(end - consumed) // size)))
            consumed, left = consumed + steps * size, left - steps
        ramp_end = self.config.training.rampup_batch_size[2] if self.config.training.rampup_batch_size else -1
        while left and consumed <= ramp_end:
            consumed, left = consumed + self.batch_size(consumed), left - 1
        return consumed + left * self.final_batch_size

    def schedule_samples_after(self, iterations: int) -> int:
        """Where the learning rate stands after so many iterations: those of --iterations-to-skip do not move it."""
        skipped = {n for n in self.config.training.iterations_to_skip or () if 0 < n <= iterations}
        passed_over = sum(self.batch_size(self.samples_after(n - 1)) for n in skipped)
        return self.samples_after(iterations) - passed_over

    def is_finished(self, iteration: int, consumed: int) -> bool:
        """A run counts in iterations or in samples. As in Megatron the last, incomplete batch is not trained on."""
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
