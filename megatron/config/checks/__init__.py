"""All checks across settings. Each raises a ConfigError that names the settings, their values and the way out.

`check` needs nothing but the settings, `check_world` the number of ranks and `check_paths` the file system. Device and
backend are checked where the device is known (`distributed/device.py`).
"""

from __future__ import annotations

from megatron.config.checks import data, kernels, model, moe, parallel, training
from megatron.config.checks.paths import check_paths
from megatron.config.checks.world import check_world
from megatron.config.run import RunConfig

__all__ = ["check", "check_paths", "check_world"]


def check(config: RunConfig, *, needs_data: bool = True, complete: bool = True) -> None:
    """All checks that need nothing but the settings.

    `complete=False`: --use-checkpoint-args has yet to fill in shape, tokenizer and sequence length.
    """
    if complete:
        model.check_required(config)
    for check_one in (*model.CHECKS, *training.CHECKS, *data.CHECKS, *parallel.CHECKS, *moe.CHECKS, *kernels.CHECKS):
        check_one(config)
    if needs_data:
        data.check_sources(config)
        if complete:
            data.check_tokenizer(config)
