"""Records the times of each pass in the last steps (--pipeline-trace DIR), one file per rank."""

import json
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.pipeline_schedules import Action

if TYPE_CHECKING:  # the program that draws the trace does not import torch
    from megatron.distributed.parallel_state import Axis

_KEPT_STEPS = 16
"""Number of steps that are kept: enough for a median, few enough for small files."""

PassTimes = list[tuple[Action, float, float]]
"""(action, start, end) of each pass of one step, in seconds since 1970. A pass starts when its input has arrived."""


@dataclass
class PassRecorder:
    """Pass times of one rank's last steps."""

    shape: dict[str, int] = field(default_factory=dict)
    """Rank in the pipeline, number of ranks, micro-batches, and chunks per rank."""
    steps: deque[PassTimes] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))

    def begin_step(self, pp: "Axis", micro_batches: int, chunks: int) -> None:
        """Begins a step; drops earlier steps if they had another shape."""
        shape = {"place": pp.rank, "ranks": pp.size, "micro_batches": micro_batches, "chunks": chunks}
        if shape != self.shape:
            self.shape = shape
            self.steps.clear()
        self.steps.append([])

    def record(self, action: Action, start: float, end: float) -> None:
        self.steps[-1].append((action, start, end))

    def save(self, directory: Path, rank: int) -> None:
        """Writes the recorded steps. Times come from the machine's clock, so they can be compared only between ranks of
        the same machine."""
        directory.mkdir(parents=True, exist_ok=True)
        steps = [[[a.kind, a.chunk, a.micro_batch, start, end] for a, start, end in step] for step in self.steps]
        content = {**self.shape, "steps": steps}
        (directory / f"rank{rank:05d}.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
