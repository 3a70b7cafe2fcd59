"""All checks across settings. Each raises a ConfigError that names the settings, their values and the way out.

`check_settings` needs nothing but the settings, `check_world` the number of ranks and `check_paths` the file system.
Device and backend are checked where the device is known (`distributed/device.py`).
"""

from __future__ import annotations

from megatron.config.checks import checkpoint, data, kernels, model, moe, parallel, training, zero
from megatron.config.checks.paths import check_paths
from megatron.config.checks.world import check_world
from megatron.config.notices import spelled, without_effect
from megatron.config.refusals import Refusals
from megatron.config.run import RunConfig
from megatron.errors import ConfigError

__all__ = ["check_paths", "check_settings", "check_world"]


def check_settings(
    config: RunConfig, *, needs_data: bool = True, complete: bool = True, refusals: Refusals | None = None
) -> None:
    """All checks that need nothing but the settings.

    `complete=False`: --use-checkpoint-args has yet to fill in shape, tokenizer and sequence length. `refusals`: those
    of the command line, which get what is found here; without them it is raised.
    """
    found = Refusals() if refusals is None else refusals
    if complete:
        missing = [flag for flag in model.missing(config) if not found.doubts(flag)]
        if missing:
            found.refuse(model.required(missing))
    modules = (model, training, data, checkpoint, parallel, moe, kernels, zero)
    checks = [check_one for module in modules for check_one in module.CHECKS]
    if needs_data:
        checks += [data.check_sources, *([data.check_tokenizer_flags] if complete else [])]
    with found.of_checking():
        for setting, need in without_effect(config):
            if setting.flag.insists:
                text = f"{spelled(config, setting.name)}: has no effect without {need.text}; add that, or leave it out"
                with found.of_checking():
                    raise ConfigError(text)
    for check_one in checks:
        with found.of_checking():
            check_one(config)
    if refusals is None:
        found.end()
