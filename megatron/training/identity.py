"""What a rank was started with: all of it must be the same on every rank, so it is compared when the ranks meet."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron.config import RunConfig
from megatron.config.run import all_settings

_PACKAGE = Path(__file__).resolve().parents[1]


def started_with(config: RunConfig) -> dict[str, str]:
    """Settings by their spelling, but for paths, which may differ between machines, and for what concerns one launch;
    hashes of the package and of the script; the version of torch."""
    compared = (setting for setting in all_settings() if not setting.flag.path and not setting.flag.cli_only)
    values = {setting.spelling: config.value(setting) for setting in compared}
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    return {
        **{name: str(value) for name, value in values.items() if value is not None},
        "the code of megatron": _hash_of(sorted(_PACKAGE.rglob("*.py"))),
        "the script": _hash_of([script]) if script.is_file() else "none",
        "torch": torch.__version__,
    }


def _hash_of(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()[:12]
