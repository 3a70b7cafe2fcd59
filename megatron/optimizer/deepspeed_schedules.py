"""DeepSpeed's learning-rate schedules as functions of the number of updates made.

DeepSpeed sets the first update's rate when it builds the scheduler. After each update it sets the next rate from the
index of the last one. The rate of update u is therefore its formula at last_batch_iteration = u - 1.
"""

import math
from dataclasses import dataclass
from typing import Any

from megatron.config.sections.deepspeed_scheduler import DeepSpeedSchedulerConfig

_DEFAULT_MAX_LR = 0.001
"""Default of the highest rate of WarmupDecayLR. (WarmupLR uses the optimizer's rate.)"""


@dataclass(frozen=True)
class DeepSpeedCurve:
    base_lr: float
    """The optimizer's own rate, --lr."""
    batch_size: int
    """Samples of one update."""
    settings: DeepSpeedSchedulerConfig

    def lr(self, num_steps: float) -> float:
        """Learning rate of the next update after `num_steps` samples."""
        return self.of_update(round(num_steps / self.batch_size))

    def of_update(self, update: int) -> float:
        """Learning rate of an update, counted from 0."""
        kind = self.settings.lr_schedule
        if kind == "WarmupLR":
            return self._warmup_lr(update, self.base_lr, decays=False)
        if kind == "WarmupDecayLR":
            return self._warmup_lr(update, _DEFAULT_MAX_LR, decays=True)
        if kind == "WarmupCosineLR":
            return self.base_lr * self._cosine_share(update)
        if kind == "OneCycle":
            return self._one_cycle(update)
        assert kind == "LRRangeTest", kind
        return self._range_test(update)

    def plain(self) -> dict[str, Any]:
        """Settings that the curve depends on, by name."""
        used = {name: getattr(self.settings, name) for name in self.settings.parameters}
        base = {"base_lr": self.base_lr} if self.settings.takes_lr else {}
        return {"lr_schedule": self.settings.lr_schedule, "batch_size": self.batch_size, **base, **used}

    @staticmethod
    def of_plain(values: dict[str, Any]) -> "DeepSpeedCurve":
        used = {name: value for name, value in values.items() if name not in ("batch_size", "base_lr")}
        return DeepSpeedCurve(values.get("base_lr", 0.0), values["batch_size"], DeepSpeedSchedulerConfig(**used))

    def _warmup_lr(self, update: int, default_max: float, *, decays: bool) -> float:
        settings, last = self.settings, update - 1
        low = settings.warmup_min_lr
        high = default_max if settings.warmup_max_lr is None else settings.warmup_max_lr
        if last < 0:
            return low
        share = self._warmed(last) if last < self._warmup_steps else 1.0
        if decays and last >= self._warmup_steps:
            assert settings.total_num_steps is not None
            left = settings.total_num_steps - last
            share = max(0.0, left / max(1.0, settings.total_num_steps - self._warmup_steps))
        return low + (high - low) * share

    def _cosine_share(self, update: int) -> float:
        settings, last = self.settings, update - 1
        if last < 0:
            return 0.0
        if last < self._warmup_steps:
            return settings.warmup_min_ratio + (1.0 - settings.warmup_min_ratio) * self._warmed(last)
        assert settings.total_num_steps is not None
        length = max(1, settings.total_num_steps - self._warmup_steps)
        position = min(1.0, (last - self._warmup_steps + 1) / length)
        falling = (1.0 + math.cos(math.pi * position)) / 2.0
        return max(0.0, settings.cos_min_ratio + (1.0 - settings.cos_min_ratio) * falling)

    @property
    def _warmup_steps(self) -> int:
        return max(2, self.settings.warmup_num_steps)

    def _warmed(self, last: int) -> float:
        if self.settings.warmup_type == "log":
            return math.log(last + 1) / math.log(self._warmup_steps)
        return last / self._warmup_steps

    def _one_cycle(self, update: int) -> float:
        settings = self.settings
        low, high = settings.cycle_min_lr, settings.cycle_max_lr
        assert low is not None and high is not None
        rise = settings.cycle_first_step_size
        fall = rise if settings.cycle_second_step_size is None else settings.cycle_second_step_size
        if update <= rise + fall:
            return low + (high - low) * self._cycled(update, rise, fall)
        if settings.decay_step_size == 0 or settings.decay_lr_rate == 0.0:
            return low
        return low / (1.0 + settings.decay_lr_rate * (update - rise - fall) / settings.decay_step_size)

    def _cycled(self, update: int, rise: int, fall: int) -> float:
        """Position between the two rates: 0 at both ends of the cycle, 1 at its peak."""
        settings = self.settings
        stairs = settings.cycle_first_stair_count
        if update <= rise:
            done, length = update, rise
        else:
            done, length = rise + fall - update, fall
            stairs = stairs if settings.cycle_second_stair_count is None else settings.cycle_second_stair_count
        return done / length if stairs == 0 else (done * stairs // length) / stairs

    def _range_test(self, update: int) -> float:
        settings = self.settings
        units = update / settings.lr_range_test_step_size
        if settings.lr_range_test_staircase:
            units = math.floor(units)
        return settings.lr_range_test_min_lr * (1.0 + settings.lr_range_test_step_rate * units)
