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
