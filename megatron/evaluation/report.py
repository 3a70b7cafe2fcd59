"""The results of an evaluation: a table for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.utils.outputs import write_output


def table(report: Mapping[str, Any]) -> str:
    """Two columns; what does not apply is left out."""
    rows = [(name.replace("_", " "), _shown(value)) for name, value in report.items() if value is not None]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    write_output(path, [json.dumps(report, indent=2, allow_nan=False)])
