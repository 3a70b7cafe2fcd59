"""Checks that depend on the number of ranks."""

from megatron.config.batch import BatchPlan
from megatron.config.notices import spelled
from megatron.config.refusals import Refusals
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.layout import SizesError, Way, divisors, multiples_around
from megatron.pipeline_schedules import fills_groups
from megatron.utils.numerals import LARGEST_WORLD


def find_in_world(config: RunConfig, world_size: int, found: Refusals) -> None:
    """Collects the errors of a layout and batch sizes that do not fit the number of ranks."""
    with found.of_checking():
        if world_size > LARGEST_WORLD:
            raise ConfigError(f"world size {world_size}: at most {LARGEST_WORLD} ranks; lower the parallel sizes")
        try:
            config.parallel.layout(world_size)
        except SizesError as error:
            raise error if config.runtime.dry_run_ranks is None else error.planned() from None
        plan = BatchPlan.on(config, world_size)
        with found.of_checking():
            _check_profiled_ranks(config, world_size)
        check_accumulation(plan)  # the checks below use the sizes of a step
        for check_one in (_check_batch, _check_interleaved, _check_evaluation, _check_changing_batch, _check_start):
            with found.of_checking():
                check_one(plan)


def _check_batch(plan: BatchPlan) -> None:
    config, dp, micro, final = plan.config, plan.dp, plan.micro_batch_size, plan.final_batch_size
    step = micro * dp
    if final % step and config.training.step_batch_size_schedule is None:
        fitting = divisors(final // dp) if final % dp == 0 else []
        raise SizesError(
            f"{spelled(config, 'global_batch_size')} is not divisible by {spelled(config, 'micro_batch_size')} x "
            f"{dp} data-parallel ranks",
            _other_batch(f"use --global-batch-size {{}} (a multiple of {step})", final, step),
            Way("use --micro-batch-size {}", "--micro-batch-size", micro, fitting),
        )


def _other_batch(words: str, size: int, unit: int) -> Way:
    return Way(words, "--global-batch-size", size, multiples_around(size, unit))


def _check_profiled_ranks(config: RunConfig, world_size: int) -> None:
    absent = [rank for rank in config.profile.profile_ranks if not 0 <= rank < world_size]
    if config.profile.profile and absent:
        raise ConfigError(
            f"{spelled(config, 'profile_ranks')}: there is no rank {absent[0]}; the ranks are 0 to {world_size - 1}"
        )


def _check_changing_batch(plan: BatchPlan) -> None:
    config, dp, step = plan.config, plan.dp, plan.micro_batch_size * plan.dp
    if config.training.step_batch_size_schedule is not None and any(size % step for size in plan.batch_sizes):
        raise ConfigError(
            f"{spelled(config, 'step_batch_size_schedule')}: not all sizes are divisible by "
            f"{spelled(config, 'micro_batch_size')} x {dp} data-parallel ranks; make each a multiple of {step}"
        )
    ramp = config.training.rampup_batch_size
    if ramp is not None and (ramp[0] % step or (plan.final_batch_size > ramp[0] and ramp[1] % step)):
        raise ConfigError(
            f"{spelled(config, 'rampup_batch_size')}: start and increment are not divisible by "
            f"{spelled(config, 'micro_batch_size')} x {dp} data-parallel ranks; make both multiples of {step}"
        )


def check_accumulation(plan: BatchPlan) -> None:
    """Checks that the global batch size equals micro-batch size x accumulation steps x data-parallel ranks."""
    config, dp = plan.config, plan.dp
    training, steps = config.training, config.training.gradient_accumulation_steps
    parts = f"{dp} data-parallel ranks"
    if steps is not None:
        parts = f"{spelled(config, 'gradient_accumulation_steps')} x {parts}"
    final, unit = plan.final_batch_size, (steps or 1) * dp
    if not training.micro_batch_size:
        if final % unit:
            raise SizesError(
                f"{spelled(config, 'global_batch_size')} is not divisible by {parts} = {unit}",
                _other_batch("make it {}", final, unit),
            )
    elif steps is not None and final != training.micro_batch_size * unit:
        product, micro = training.micro_batch_size * unit, spelled(config, "micro_batch_size")
        raise SizesError(
            f"{spelled(config, 'global_batch_size')} is not {micro} x {parts} = {product}",
            Way("make it {}", "--global-batch-size", final, [product]),
            "remove one of the three settings",
        )


def _check_start(plan: BatchPlan) -> None:
    """Checks that --override-ckpt-iteration leaves something to train."""
    config, start = plan.config, plan.config.checkpoint.override_ckpt_iteration
    if start is None or config.training.skip_train or not plan.is_finished(start, plan.samples_after(start)):
        return
    length = "train_iters" if config.training.train_iters is not None else "train_samples"
    raise ConfigError(
        f"{spelled(config, 'override_ckpt_iteration')}: nothing is left of {spelled(config, length)} after that "
        f"iteration; give an earlier iteration, or a larger --{length.replace('_', '-')}"
    )


def _check_evaluation(plan: BatchPlan) -> None:
    config, size = plan.config, plan.evaluation_batch_size
    given = [
        n for n in ("eval_global_batch_size", "eval_micro_batch_size") if getattr(config.evaluation, n) is not None
    ]
    unit = plan.evaluation_micro_batch_size * plan.dp
    if given and size % unit:
        micro = "--eval-micro-batch-size" if "eval_micro_batch_size" in given else "--micro-batch-size"
        flag = "--eval-global-batch-size"
        raise SizesError(
            f"{spelled(config, given[0])}: {size} samples per evaluation step are not a multiple of {unit} ({micro} x "
            f"{plan.dp} data-parallel ranks)",
            Way(f"use {flag} {{}}", flag, size, multiples_around(size, unit)),
        )


def _check_interleaved(plan: BatchPlan) -> None:
    """Checks that micro-batches form groups, none smaller than the pipeline, as the interleaved schedule requires."""
    config, dp = plan.config, plan.dp
    pp, group = config.parallel.pipeline_model_parallel_size, config.parallel.micro_batch_group
    if group is None:
        return
    step, sizes, training = plan.micro_batch_size * dp, plan.batch_sizes, config.training
    if not all(size % step == 0 and fills_groups(size // step, group, pp) for size in sizes):
        unit = step * group
        changing = [n for n in ("rampup_batch_size", "step_batch_size_schedule") if getattr(training, n) is not None]
        named = next(iter(changing), "global_batch_size")
        way = f"use multiples of {unit} (--micro-batch-size x {dp} data-parallel ranks x {group})"
        by = "pipeline_model_parallel_size" if group == pp else "microbatch_group_size_per_virtual_pipeline_stage"
        rest = "" if group == pp else f" and at least {pp} in the last"
        raise SizesError(
            f"{spelled(config, named)}: the interleaved schedule takes micro-batches in groups of "
            f"{spelled(config, by)}{rest}",
            way if changing else _other_batch(f"{way}, such as {{}}", sizes[0], unit),
            "remove --num-layers-per-virtual-pipeline-stage",
        )
