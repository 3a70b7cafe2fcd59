"""What a rank was started with: all of it must be the same on every rank, so it is compared when the ranks meet."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from megatron.config import RunConfig
from megatron.config.run import all_settings
from megatron.utils.durable import hash_of_files

_PACKAGE = Path(__file__).resolve().parents[1]


def started_with(config: RunConfig) -> dict[str, str]:
    """Settings by their spelling, but for paths, which may differ between machines, and for what concerns one launch;
    hashes of the package and of the script; the version of torch."""
    compared = (setting for setting in all_settings() if not setting.flag.path and not setting.flag.cli_only)
    values = {setting.spelling: config.value(setting) for setting in compared}
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    return {
        **{name: str(value) for name, value in values.items() if value is not None},
        "the code of megatron": hash_of_files(_PACKAGE, _PACKAGE.rglob("*.py"))[:12],
        "the script": hash_of_files(script.parent, [script])[:12] if script.is_file() else "none",
        "torch": torch.__version__,
    }
