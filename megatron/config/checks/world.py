"""Checks that depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config.batch import BatchPlan
from megatron.config.notices import spelled
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.layout import nearest_divisors, nearest_multiples


def check_world(config: RunConfig, world_size: int) -> None:
    """The layout and the batch sizes fit the number of ranks."""
    config.parallel.layout(world_size)  # raises if a size does not fit
    plan = BatchPlan.on(config, world_size)
    dp = plan.dp
    micro = config.training.micro_batch_size
    step = micro * dp
    final = plan.final_batch_size
    if final % step and config.training.step_batch_size_schedule is None:
        fitting = f", or --micro-batch-size {_either(nearest_divisors(final // dp, micro))}" if final % dp == 0 else ""
        raise ConfigError(
            f"{spelled(config, 'global_batch_size')} does not divide by {spelled(config, 'micro_batch_size')} x "
            f"{dp} data-parallel ranks; use --global-batch-size {_either(nearest_multiples(final, step))} (a multiple "
            f"of {step}){fitting}"
        )
    _check_interleaved(plan)
    absent = [rank for rank in config.profile.profile_ranks if not 0 <= rank < world_size]
    if config.profile.profile and absent:
        raise ConfigError(
            f"{spelled(config, 'profile_ranks')}: there is no rank {absent[0]}; the ranks are 0 to {world_size - 1}"
        )
    _check_evaluation(plan)
    if config.training.step_batch_size_schedule is not None and any(size % step for size in plan.batch_sizes):
        raise ConfigError(
            f"{spelled(config, 'step_batch_size_schedule')}: not all sizes divide by "
            f"{spelled(config, 'micro_batch_size')} x {dp} data-parallel ranks; make each a multiple of {step}"
        )
    ramp = config.training.rampup_batch_size
    if ramp is not None and (ramp[0] % step or (final > ramp[0] and ramp[1] % step)):
        raise ConfigError(
            f"{spelled(config, 'rampup_batch_size')}: start and increment do not divide by "
            f"{spelled(config, 'micro_batch_size')} x {dp} data-parallel ranks; make both multiples of {step}"
        )


def _check_evaluation(plan: BatchPlan) -> None:
    config, size = plan.config, plan.evaluation_batch_size
    given = [
        n for n in ("eval_global_batch_size", "eval_micro_batch_size") if getattr(config.evaluation, n) is not None
    ]
    pp = config.parallel.pipeline_model_parallel_size if config.parallel.schedule == "interleaved" else 1
    unit = plan.evaluation_micro_batch_size * plan.dp * pp
    if given and size % unit:
        micro = "--eval-micro-batch-size" if "eval_micro_batch_size" in given else "--micro-batch-size"
        raise ConfigError(
            f"{spelled(config, given[0])}: {size} samples per evaluation step are not a multiple of {unit} ({micro} x "
            f"{plan.dp} data-parallel ranks{f' x {pp} pipeline stages' if pp > 1 else ''}); use "
            f"--eval-global-batch-size {_either(nearest_multiples(size, unit))}"
        )


def _either(sizes: Sequence[int]) -> str:
    return " or ".join(map(str, sizes))


def _check_interleaved(plan: BatchPlan) -> None:
    """The interleaved schedule needs a multiple of the pipeline size in micro-batches."""
    config, dp = plan.config, plan.dp
    parallel, pp = config.parallel, config.parallel.pipeline_model_parallel_size
    if parallel.schedule != "interleaved":
        return
    unit = config.training.micro_batch_size * dp * pp
    sizes, training = plan.batch_sizes, config.training
    if any(size % unit for size in sizes):
        changing = [n for n in ("rampup_batch_size", "step_batch_size_schedule") if getattr(training, n) is not None]
        named = next(iter(changing), "global_batch_size")
        nearest = "" if changing else f", such as {_either(nearest_multiples(sizes[0], unit))}"
        raise ConfigError(
            f"{spelled(config, named)}: the interleaved schedule takes micro-batches in groups of "
            f"{spelled(config, 'pipeline_model_parallel_size')}; use multiples of {unit} (--micro-batch-size x {dp} "
            f"data-parallel ranks x {pp}){nearest}, or leave out --num-layers-per-virtual-pipeline-stage"
        )
