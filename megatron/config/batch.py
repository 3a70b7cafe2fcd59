"""How many samples a step takes, and how many steps a run has. Pure arithmetic on the configuration."""

from __future__ import annotations

from megatron.config.run import RunConfig


def data_parallel_size(config: RunConfig, world_size: int) -> int:
    """Ranks that hold different samples; `check_world` has made sure that it divides."""
    return world_size // config.parallel.model_parallel_size


def global_batch_size(config: RunConfig, dp: int) -> int:
    """Samples per optimizer step once a ramp-up, if any, is over."""
    training = config.training
    return training.global_batch_size if training.global_batch_size is not None else training.micro_batch_size * dp


def batch_size_at(config: RunConfig, dp: int, consumed: int) -> int:
    """Global batch size of the step that starts after `consumed` samples.

    The ramp is Megatron's: equal shares of the ramp's samples for each increment, in floating point as there, so that
    the batch size changes at the same sample.
    """
    final = global_batch_size(config, dp)
    ramp = config.training.rampup_batch_size
    if ramp is None:
        return final
    start, increment, ramp_samples = ramp
    increments = (final - start) // increment
    if increments == 0 or ramp_samples == 0 or consumed > ramp_samples:
        return final
    steps = int(consumed / (ramp_samples / increments))
    return start + steps * increment


def num_micro_batches_at(config: RunConfig, dp: int, consumed: int) -> int:
    return batch_size_at(config, dp, consumed) // (config.training.micro_batch_size * dp)


def train_iters(config: RunConfig, dp: int) -> int:
    """Steps of the whole run; with --train-samples the last, incomplete batch is not trained on, as in Megatron."""
    training = config.training
    if training.train_iters is not None:
        return training.train_iters
    if training.train_samples is None:
        return 0
    steps = consumed = 0
    ramp_end = training.rampup_batch_size[2] if training.rampup_batch_size is not None else -1
    while consumed <= ramp_end:
        batch = batch_size_at(config, dp, consumed)
        if consumed + batch > training.train_samples:
            return steps
        consumed += batch
        steps += 1
    return steps + (training.train_samples - consumed) // global_batch_size(config, dp)


def train_samples(config: RunConfig, dp: int) -> int:
    """Samples that the whole run asks of the dataset."""
    training = config.training
    if training.train_samples is not None:
        return training.train_samples
    return (training.train_iters or 0) * global_batch_size(config, dp)
