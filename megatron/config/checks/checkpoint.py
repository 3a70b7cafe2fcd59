"""Checks of checkpoint settings against each other."""

from pathlib import Path

from megatron.config.notices import spelled
from megatron.config.run import RunConfig
from megatron.errors import ConfigError


def check_retention(config: RunConfig) -> None:
    checkpoint = config.checkpoint
    retain, interval = checkpoint.save_retain_interval, checkpoint.save_interval
    if checkpoint.save is None or retain is None:
        return
    if interval is None:
        raise ConfigError(
            f"{spelled(config, 'save_retain_interval')}: without --save-interval only the last step is saved; add "
            "--save-interval STEPS, or remove this setting"
        )
    if retain % interval:
        raise ConfigError(
            f"{spelled(config, 'save_retain_interval')} is not a multiple of {spelled(config, 'save_interval')}, "
            "and only saved checkpoints can be kept; use a multiple"
        )


def check_non_persistent(config: RunConfig) -> None:
    checkpoint = config.checkpoint
    if checkpoint.save is None:
        return
    kind, local = checkpoint.non_persistent_ckpt_type, checkpoint.non_persistent_local_ckpt_dir
    if checkpoint.non_persistent_save_interval is not None and kind is None:
        raise ConfigError(
            f"{spelled(config, 'non_persistent_save_interval')}: the place of these checkpoints is missing; add "
            "--non-persistent-ckpt-type global, or local with --non-persistent-local-ckpt-dir"
        )
    if kind == "local" and local is None:
        raise ConfigError(
            "--non-persistent-ckpt-type local: needs a directory on each machine; add --non-persistent-local-ckpt-dir"
        )
    other, of = (local, "local") if kind == "local" else (checkpoint.non_persistent_global_ckpt_dir, "global")
    if kind is not None and other is not None and Path(other).resolve() == Path(checkpoint.save).resolve():
        raise ConfigError(
            f"--non-persistent-{of}-ckpt-dir {other}: is the same as --save, whose old steps would be deleted; give "
            "another directory"
        )


CHECKS = (check_retention, check_non_persistent)
