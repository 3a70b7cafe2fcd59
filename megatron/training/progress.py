"""Where a run stands: the integers that, with the data and the seed, decide every sample still to come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    schedule_samples: int = 0  # a skipped step consumes data but does not move the schedules
