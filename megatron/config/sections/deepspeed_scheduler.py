"""DeepSpeed's learning-rate schedules, with the names of its JSON file and command line."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from megatron.config.flag import Need, excludes, flag
from megatron.config.sections.optimizer import ScheduleConfig

_WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type")
_CYCLE = (
    *("cycle_min_lr", "cycle_max_lr", "cycle_first_step_size", "cycle_second_step_size", "cycle_momentum"),
    *("cycle_first_stair_count", "cycle_second_stair_count", "decay_lr_rate", "decay_step_size"),
)
_RANGE = ("min_lr", "step_size", "step_rate", "staircase")
PARAMETERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "WarmupLR": _WARMUP,
        "WarmupDecayLR": ("total_num_steps", *_WARMUP),
        "WarmupCosineLR": ("total_num_steps", "warmup_num_steps", "warmup_type", "warmup_min_ratio", "cos_min_ratio"),
        "OneCycle": _CYCLE,
        "LRRangeTest": tuple(f"lr_range_test_{name}" for name in _RANGE),
    }
)
"""Schedule -> its parameters."""

REQUIRED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "WarmupDecayLR": ("total_num_steps",),
        "WarmupCosineLR": ("total_num_steps",),
        "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
    }
)
"""Schedule -> its parameters without a default."""


_OF_EVERY_SCHEDULE = ("lr", "override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler")
_OF_MEGATRON = tuple(field.name for field in fields(ScheduleConfig) if field.name not in _OF_EVERY_SCHEDULE)


@dataclass(frozen=True, kw_only=True)
class DeepSpeedSchedulerConfig:
    """Parameters of DeepSpeed's learning-rate schedules. All lengths are in optimizer steps."""

    lr_schedule: str | None = flag(
        None,
        "Learning-rate schedule of DeepSpeed, with the same learning rates. Replaces --lr-decay-style.",
        choices=tuple(PARAMETERS),
        excludes=(
            *excludes(*_OF_MEGATRON, why="each chooses the schedule", given=True),
            *excludes(
                "rampup_batch_size", "step_batch_size_schedule", why="DeepSpeed's schedules count steps of one size"
            ),
        ),
    )
    warmup_min_lr: float = flag(0.0, "Learning rate at the start of the warm-up.", at_least=0.0)
    warmup_max_lr: float | None = flag(
        None,
        "Learning rate at the end of the warm-up. Unset: --lr with WarmupLR, else DeepSpeed's 0.001.",
        at_least=0.0,
    )
    warmup_num_steps: int = flag(1000, "Length of the warm-up.", at_least=1)
    warmup_type: str = flag("log", "Shape of the warm-up.", choices=("log", "linear"))
    total_num_steps: int | None = flag(None, "Step at which the decay ends, counted from the first step.", at_least=1)
    warmup_min_ratio: float = flag(0.0, "Learning rate at the start of the warm-up, as a share of --lr.", at_least=0.0)
    cos_min_ratio: float = flag(0.0001, "Learning rate at the end of the decay, as a share of --lr.", at_least=0.0)
    cycle_min_lr: float | None = flag(None, "Learning rate at both ends of the cycle.", at_least=0.0)
    cycle_max_lr: float | None = flag(None, "Learning rate in the middle of the cycle.", at_least=0.0)
    decay_lr_rate: float = flag(
        0.0, "Decay after the cycle: the rate is --cycle-min-lr / (1 + this x steps / --decay-step-size).", at_least=0.0
    )
    cycle_first_step_size: int = flag(2000, "Length of the cycle's rise.", at_least=1)
    cycle_second_step_size: int | None = flag(None, "Length of the cycle's fall. Unset: like the rise.", at_least=1)
    cycle_first_stair_count: int = flag(0, "Stairs of the rise. 0: continuous.", at_least=0)
    cycle_second_stair_count: int | None = flag(None, "Stairs of the fall. Unset: as many as the rise.", at_least=0)
    decay_step_size: int = flag(0, "Unit of the decay after the cycle, in steps. 0: no decay.", at_least=0)
    cycle_momentum: bool = flag(
        False,
        "Cycle the momentum against the learning rate. The default in a DeepSpeed file is true.",
        status="later",
        note='remove the flag (in a file: "cycle_momentum": false) to keep the momentum constant',
    )
    lr_range_test_min_lr: float = flag(1e-3, "Learning rate at the start of the test.", at_least=0.0)
    lr_range_test_step_size: int = flag(2000, "Steps in which the rate grows by one unit.", at_least=1)
    lr_range_test_step_rate: float = flag(1.0, "Unit of growth, as a share of --lr-range-test-min-lr.", at_least=0.0)
    lr_range_test_staircase: bool = flag(False, "Grow once per --lr-range-test-step-size steps, not continuously.")

    @staticmethod
    def needs_of(name: str) -> tuple[Need, ...]:
        """Returns the need of a parameter: a schedule that uses it."""
        kinds = [kind for kind, names in PARAMETERS.items() if name in names]
        need = Need(f"--lr-schedule {' or '.join(kinds)}", lambda run: run.deepspeed_scheduler.lr_schedule in kinds)
        return (need,) if kinds else ()

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names that have an effect; none without --lr-schedule."""
        return () if self.lr_schedule is None else PARAMETERS[self.lr_schedule]

    @property
    def takes_lr(self) -> bool:
        """True if --lr has an effect. The other schedules define their own rates."""
        if self.lr_schedule == "WarmupLR":
            return self.warmup_max_lr is None
        return self.lr_schedule in (None, "WarmupCosineLR")
