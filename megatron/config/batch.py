"""How many samples a step takes, and how many steps a run has. Pure arithmetic on the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.run import RunConfig


@dataclass(frozen=True)
class BatchPlan:
    """The batch sizes of a run on `dp` data-parallel ranks. Steps and samples are those of all ranks together."""

    config: RunConfig
    dp: int

    @staticmethod
    def on(config: RunConfig, world_size: int) -> BatchPlan:
        """`check_world` has checked that the division is exact."""
        return BatchPlan(config, world_size // config.parallel.model_parallel_size)

    @property
    def final_batch_size(self) -> int:
        """Samples per step once a ramp-up, if any, is over, and in evaluation."""
        training = self.config.training
        return training.micro_batch_size * self.dp if training.global_batch_size is None else training.global_batch_size

    def batch_size(self, consumed: int) -> int:
        """Samples of the step that starts after `consumed` samples.

        As in Megatron every increment takes an equal share of the ramp's samples, computed in floating point so that
        the batch size changes at the same sample.
        """
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
        """Of one rank in a step."""
        return batch_size // (self.config.training.micro_batch_size * self.dp)

    @property
    def total_iterations(self) -> int:
        """Of a run from its beginning. A resumed run asks `iterations_left`: its earlier steps may have had another
        batch size."""
        return self.iterations_left(0, 0)

    @property
    def train_samples(self) -> int:
        """Samples that the whole run asks of the dataset."""
        training = self.config.training
        if training.train_samples is not None:
            return training.train_samples
        return (training.train_iters or 0) * self.final_batch_size

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
