"""Builds the store of non-persistent checkpoints that the settings ask for."""

from __future__ import annotations

from pathlib import Path

from megatron.checkpoint import NonPersistent
from megatron.checkpoint.local.non_persistent import LocalNonPersistent
from megatron.checkpoint.paths import NON_PERSISTENT
from megatron.training.checks import copies_of
from megatron.training.initialize import Run


def non_persistent_of(run: Run) -> NonPersistent | None:
    settings = run.config.checkpoint
    if settings.save is None or settings.non_persistent_ckpt_type is None:
        return None
    save = Path(settings.save)
    if settings.non_persistent_ckpt_type == "local":
        assert settings.non_persistent_local_ckpt_dir is not None
        directory = Path(settings.non_persistent_local_ckpt_dir)
        return LocalNonPersistent(directory, save, run.parallel, copies_of(run.config, run.launch))
    given = settings.non_persistent_global_ckpt_dir
    return NonPersistent(save / NON_PERSISTENT if given is None else Path(given), save, run.parallel)
