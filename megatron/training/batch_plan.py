"""The batch sizes of one run on one number of data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config import RunConfig
from megatron.config import batch as arithmetic


@dataclass(frozen=True)
class BatchPlan:
    config: RunConfig
    dp: int

    @property
    def total_iterations(self) -> int:
        """Of a run from its beginning. A resumed run asks `iterations_left`: its earlier steps may have been of
        another batch size."""
        return arithmetic.train_iters(self.config, self.dp)

    @property
    def train_samples(self) -> int:
        return arithmetic.train_samples(self.config, self.dp)

    @property
    def final_batch_size(self) -> int:
        """After a ramp-up, and in evaluation."""
        return arithmetic.global_batch_size(self.config, self.dp)

    def batch_size(self, consumed: int) -> int:
        return arithmetic.batch_size_at(self.config, self.dp, consumed)

    def micro_batches(self, batch_size: int) -> int:
        """Of one rank."""
        return batch_size // (self.config.training.micro_batch_size * self.dp)

    def is_finished(self, iteration: int, consumed: int) -> bool:
        """A run counts in iterations or in samples; the last, incomplete batch of samples is not trained on."""
        training = self.config.training
        if training.train_iters is not None:
            return iteration >= training.train_iters
        return consumed + self.batch_size(consumed) > (training.train_samples or 0)

    def iterations_left(self, iteration: int, consumed: int) -> int:
        training = self.config.training
        if training.train_iters is not None:
            return max(0, training.train_iters - iteration)
        left = 0
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
