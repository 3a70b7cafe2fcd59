"""Why a run ended, for people and for restart policies."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StopReason:
    kind: str  # "done", "dry_run", "exit_interval", "exit_duration", "signal", or an error's class
    text: str
    exit_code: int = 0

    def write(self, directory: str | None, **details: int) -> None:
        """`exit_reason.json` beside the checkpoints, because torchrun's own exit code says little."""
        if directory is None:
            return
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        temporary = target / ".tmp-exit_reason.json"
        record = {"reason": self.kind, "text": self.text, "exit_code": self.exit_code, **details}
        temporary.write_text(json.dumps(record) + "\n", encoding="utf-8")
        temporary.replace(target / "exit_reason.json")
