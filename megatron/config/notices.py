"""Lines printed once at the start of a run, about settings that have no effect or an unexpected one."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.flag import Need, Setting
from megatron.config.run import RunConfig, all_settings, settings_by_name
from megatron.config.values import show


def given(config: RunConfig, name: str) -> bool:
    """Whether the user set it, by a flag or in a file. (The values of a preset or a checkpoint do not count.)"""
    origin = config.origins.get(name)
    return origin is not None and not origin.startswith(("preset ", "checkpoint"))


def spelled(config: RunConfig, name: str) -> str:
    """A setting and its value as the user would type them."""
    setting = settings_by_name()[name]
    value = config.value(setting)
    if setting.is_switch:
        return setting.spelling if value != bool(setting.flag.off) else f"{setting.spelling}=false"
    return f"{setting.spelling} {show(value)}"


def notices_of(config: RunConfig) -> Iterator[str]:
    """The lines of this configuration; those of retired and no-op flags are made where they are read."""
    yield from _activation(config)
    yield from _attention(config)
    yield from _experts(config)
    yield from _iterations_to_skip(config)
    for setting, need in without_effect(config):
        if not setting.flag.insists:
            yield f"{spelled(config, setting.name)}: has no effect without {need.text}"


def without_effect(config: RunConfig) -> Iterator[tuple[Setting, Need]]:
    """The settings that were given and have no effect, each with the first thing that it needs and that is not there.
    A switch as it is by default asks for nothing, nor does a value that was taken out again."""
    for setting in all_settings():
        value = config.value(setting)
        if given(config, setting.name) and value is not None and not (setting.is_switch and value == setting.default):
            unmet = [need for need in setting.flag.needs if not need.met(config)]
            if unmet:
                yield setting, unmet[0]


def _activation(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.activation == "gelu_erf":
        turned_off = given(config, "bias_gelu_fusion") and not model.bias_gelu_fusion
        cause = "--no-bias-gelu-fusion" if turned_off else "--disable-bias-linear"
        yield f"{cause}: GELU is computed in its erf form, as in Megatron; --openai-gelu keeps the tanh form"


def _attention(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.use_rotary_position_embeddings:
        yield "--use-rotary-position-embeddings: taken as --position-embedding-type rope, without a learned table"
    if given(config, "num_query_groups") and not model.group_query_attention:
        yield f"{spelled(config, 'num_query_groups')}: turns grouped-query attention on"


def _experts(config: RunConfig) -> Iterator[str]:
    if config.moe.balances and config.moe.balanced_over == "micro-batch":
        yield (
            f"{spelled(config, 'moe_router_load_balancing_type')}: looks at the tokens of a micro-batch together, so "
            "training depends on --micro-batch-size; seq_aux_loss does not"
        )


def _iterations_to_skip(config: RunConfig) -> Iterator[str]:
    skipped, length = config.training.iterations_to_skip or (), config.training.train_iters
    beyond = [number for number in skipped if number < 1 or (length is not None and number > length)]
    if beyond:
        yield f"--iterations-to-skip {show(beyond)}: no such iterations; they are counted from 1 to --train-iters"
