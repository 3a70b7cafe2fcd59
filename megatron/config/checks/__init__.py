"""Every check across settings. Each error names the settings, their values and the way out.

`check` needs nothing but the configuration; `check_world` needs the number of ranks, `check_backend` the device, and
`check_paths` looks at the file system. All raise ConfigError and change nothing.
"""

from __future__ import annotations

from megatron.config.checks import data, model, training
from megatron.config.checks.paths import check_paths
from megatron.config.checks.world import check_backend, check_world
from megatron.config.run import RunConfig

__all__ = ["check", "check_backend", "check_paths", "check_world"]


def check(config: RunConfig, *, needs_data: bool = True) -> None:
    """All checks that need nothing but the configuration itself."""
    model.check_required(config)
    for check_one in (*model.CHECKS, *training.CHECKS, *data.CHECKS):
        check_one(config)
    if needs_data:
        data.check_sources(config)
        data.check_tokenizer(config)
