"""Notices about settings that have no effect or an unexpected effect. They are printed once, at the start of a run."""

from collections.abc import Iterator

from megatron.config.flag import Need, Setting
from megatron.config.run import RunConfig, all_settings, settings_by_name
from megatron.config.values import show


def spelled(config: RunConfig, name: str) -> str:
    """Returns a setting and its value as a user would type them, with the key of the settings file if a key set the
    value."""
    setting = settings_by_name()[name]
    value = config.value(setting)
    origin = config.origins.get(name, "")
    if config.keys is not None and origin.startswith("key "):
        return origin.removeprefix("key ")
    key = f" ({origin.removeprefix('key ')})" if origin.startswith("key ") else ""
    if setting.is_switch:
        return f"{setting.spelling if value != bool(setting.flag.off) else f'{setting.spelling}=false'}{key}"
    return f"{setting.spelling} {show(value)}{key}"


def to_add(config: RunConfig, name: str) -> str:
    """Returns the flag or key to add for a missing setting."""
    if config.keys is None:
        return settings_by_name()[name].spelling
    block, _, key = config.keys[name].rpartition(".")
    return f'"{key}" to {block or "the file"}'


def notices_of(config: RunConfig) -> Iterator[str]:
    """Yields the notices of a configuration. Notices about retired and no-op flags come from `Assignments`."""
    yield from _of_the_model(config)
    yield from _of_the_training(config)
    for setting, need in without_effect(config):
        if not setting.flag.insists:
            yield f"{spelled(config, setting.name)}: has no effect without {need.text}"


def without_effect(config: RunConfig) -> Iterator[tuple[Setting, Need]]:
    """Yields the given settings that have no effect, each with its first unmet need. A value of None, a switch at its
    default and a default of "none" count as not given."""
    for setting in all_settings():
        value = config.value(setting)
        asks = value is not None and not (value == setting.default and (setting.is_switch or value == "none"))
        if config.given(setting.name) and asks:
            unmet = [need for need in setting.flag.needs if not need.met(config)]
            if unmet:
                yield setting, unmet[0]


def _of_the_model(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.activation == "gelu_erf":
        turned_off = config.given("bias_gelu_fusion") and not model.bias_gelu_fusion
        cause = "--no-bias-gelu-fusion" if turned_off else "--disable-bias-linear"
        yield f"{cause}: GELU is computed in its erf form, as in Megatron; --openai-gelu keeps the tanh form"
    if model.use_rotary_position_embeddings:
        yield "--use-rotary-position-embeddings: taken as --position-embedding-type rope, without a learned table"
    if config.given("num_query_groups") and not model.group_query_attention:
        yield f"{spelled(config, 'num_query_groups')}: turns grouped-query attention on"
    if "a2a+p2p" in config.parallel.cp_comm_type and config.parallel.context_parallel_size > 1:
        yield f"{spelled(config, 'cp_comm_type')}: taken as p2p, which gives the same result over one group of ranks"
    if config.moe.balances and config.moe.balanced_over == "micro-batch":
        yield (
            f"{spelled(config, 'moe_router_load_balancing_type')}: balances experts over a whole micro-batch, so "
            "the result depends on --micro-batch-size; with seq_aux_loss it does not"
        )


def _of_the_training(config: RunConfig) -> Iterator[str]:
    scheduler, precision, optimizer = config.deepspeed_scheduler, config.precision, config.optimizer
    total = scheduler.total_num_steps if "total_num_steps" in scheduler.parameters else None
    if total is not None and total < scheduler.warmup_num_steps:
        yield (
            f"{spelled(config, 'total_num_steps')} is below {spelled(config, 'warmup_num_steps')}: there is no decay; "
            "after the warm-up the learning rate is at its minimum"
        )
    if config.given("loss_scale") and precision.loss_scale != 1.0 and not precision.fp16:
        kind = "bf16" if precision.bf16 else "fp32"
        yield (
            f"{spelled(config, 'loss_scale')}: {kind} training needs no loss scale; the scale only changes the "
            "rounding of the gradients"
        )
    bf16 = 2.0**-9  # largest relative rounding error of bf16
    if optimizer.has_narrow_moments and optimizer.exp_avg_sq_dtype == "bf16" and 1.0 - optimizer.adam_beta2 < bf16:
        yield (
            f"{spelled(config, 'exp_avg_sq_dtype')}: with {spelled(config, 'adam_beta2')} the decay of one step is "
            "smaller than the rounding of bf16, so the second moment hardly falls; use --adam-beta2 0.99 or less"
        )
    skipped, length = config.training.iterations_to_skip or (), config.training.train_iters
    beyond = [number for number in skipped if number < 1 or (length is not None and number > length)]
    if beyond:
        yield f"--iterations-to-skip {show(beyond)}: no such iterations; they are counted from 1 to --train-iters"
