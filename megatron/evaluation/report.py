"""The results of an evaluation: a table for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError
from megatron.utils.durable import write_atomically, writing


def table(report: Mapping[str, Any]) -> str:
    """Two columns; what does not apply is left out."""
    rows = [(name.replace("_", " "), _shown(value)) for name, value in report.items() if value is not None]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def check_output(path: Path) -> None:
    """Before the work: where the results cannot be written, nothing is computed."""
    if path.is_dir():
        raise ConfigError(f"--output {path}: is a directory; give a file's name")
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: there is no directory {path.parent}; make it first")


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    text = json.dumps(report, indent=2, allow_nan=False)
    with writing(path):
        write_atomically(path, [f"{text}\n".encode()])
