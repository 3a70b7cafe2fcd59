"""DeepSpeed's schedules against its published formulas, evaluated after each update as in its scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from megatron.config.sections.deepspeed_scheduler import PARAMETERS, DeepSpeedSchedulerConfig
from megatron.config.sections.optimizer import OptimizerConfig, ScheduleConfig
from megatron.errors import ConfigError
from megatron.optimizer import Schedule, build_schedule
from megatron.optimizer import deepspeed_schedules as module

BATCH, UPDATES, LR = 4, 60, 3e-3
Settings = dict[str, Any]


def build(settings: Settings, lr: float | None = LR, **schedule: Any) -> Schedule:
    return build_schedule(
        ScheduleConfig(lr=lr, **schedule),
        OptimizerConfig(),
        DeepSpeedSchedulerConfig(**settings),
        global_batch_size=BATCH,
        train_iters=UPDATES,
    )


def rates(schedule: Schedule) -> list[float]:
    return [schedule.lr(update * BATCH) for update in range(UPDATES)]


# The formulas as functions of last_batch_iteration, which is -1 for the first update. Defaults are DeepSpeed's.


def warmup(last: int, steps: int, kind: str) -> float:
    steps = max(2, steps)
    return math.log(last + 1) / math.log(steps) if kind == "log" else last / steps


def warmup_lr(
    last: int, low: float = 0.0, high: float = LR, steps: int = 1000, kind: str = "log", total: int | None = None
) -> float:
    if last < 0:
        return low
    gamma = 1.0
    if last < max(2, steps):
        gamma = warmup(last, steps, kind)
    elif total is not None:
        gamma = max(0.0, (total - last) / max(1.0, total - max(2, steps)))
    return low + (high - low) * gamma


def warmup_cosine_lr(last: int, total: int, low: float = 0.0, steps: int = 1000, end: float = 1e-4) -> float:
    if last < 0:
        return 0.0
    if last < steps:
        return LR * (low + (1 - low) * warmup(last, steps, "log"))
    x = min(1.0, (last - steps + 1) / max(1, total - steps))
    return LR * (end + (1 - end) * (1 + math.cos(math.pi * x)) / 2)


def one_cycle(
    last: int, rise: int, fall: int, rate: float = 0.0, unit: int = 0, stairs: tuple[int, int] = (0, 0)
) -> float:
    low, high, count = 1e-4, 1e-2, last + 1
    if last < 0:
        return low
    if last < rise + fall:
        x = 1.0 + count / (rise + fall) - math.floor(1 + count / (rise + fall))
        ratio = rise / (rise + fall)
        scale = x / ratio if x <= ratio else (x - 1) / (ratio - 1)
        number = stairs[0] if x <= ratio else stairs[1]
        if number:
            scale = math.floor(scale * number + 1e-9) / number
        return low + (high - low) * scale
    return low / (1 + rate * (last - rise - fall + 1) / unit) if unit else low


def range_test(last: int, low: float, unit: int, rate: float, stairs: bool) -> float:
    interval = (last + 1) / unit
    return low * (1 + rate * (math.floor(interval) if stairs else interval))


CYCLE = {"lr_schedule": "OneCycle", "cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2}
RANGE = {"lr_schedule": "LRRangeTest", "lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 7}
CASES: dict[str, tuple[Settings, Callable[[int], float]]] = {
    "defaults": ({"lr_schedule": "WarmupLR"}, lambda n: warmup_lr(n)),
    "log": (
        {"lr_schedule": "WarmupLR", "warmup_min_lr": 1e-4, "warmup_max_lr": 2e-3, "warmup_num_steps": 20},
        lambda n: warmup_lr(n, 1e-4, 2e-3, 20),
    ),
    "linear": (
        {"lr_schedule": "WarmupLR", "warmup_num_steps": 20, "warmup_type": "linear"},
        lambda n: warmup_lr(n, 0.0, LR, 20, "linear"),
    ),
    "one step": ({"lr_schedule": "WarmupLR", "warmup_num_steps": 1}, lambda n: warmup_lr(n, steps=1)),
    "decay": (
        {"lr_schedule": "WarmupDecayLR", "total_num_steps": 50, "warmup_max_lr": 2e-3, "warmup_num_steps": 12},
        lambda n: warmup_lr(n, 0.0, 2e-3, 12, "log", 50),
    ),
    "decay to a floor": (
        {"lr_schedule": "WarmupDecayLR", "total_num_steps": 50, "warmup_min_lr": 5e-4, "warmup_num_steps": 12},
        lambda n: warmup_lr(n, 5e-4, 0.001, 12, "log", 50),
    ),
    "nothing to decay": (
        {"lr_schedule": "WarmupDecayLR", "total_num_steps": 10, "warmup_num_steps": 12},
        lambda n: warmup_lr(n, 0.0, 0.001, 12, "log", 10),
    ),
    "cosine": (
        {"lr_schedule": "WarmupCosineLR", "total_num_steps": 50, "warmup_num_steps": 12},
        lambda n: warmup_cosine_lr(n, 50, steps=12),
    ),
    "cosine between ratios": (
        {
            "lr_schedule": "WarmupCosineLR",
            "total_num_steps": 40,
            "warmup_num_steps": 5,
            "warmup_min_ratio": 0.2,
            "cos_min_ratio": 0.1,
        },
        lambda n: warmup_cosine_lr(n, 40, 0.2, 5, 0.1),
    ),
    "cycle": (
        {**CYCLE, "cycle_first_step_size": 10, "cycle_second_step_size": 20},
        lambda n: one_cycle(n, 10, 20),
    ),
    "cycle and decay": (
        {**CYCLE, "cycle_first_step_size": 10, "decay_lr_rate": 0.5, "decay_step_size": 4},
        lambda n: one_cycle(n, 10, 10, 0.5, 4),
    ),
    "cycle with stairs": (
        {
            **CYCLE,
            "cycle_first_step_size": 12,
            "cycle_second_step_size": 20,
            "cycle_first_stair_count": 3,
            "cycle_second_stair_count": 5,
        },
        lambda n: one_cycle(n, 12, 20, stairs=(3, 5)),
    ),
    "range": (RANGE, lambda n: range_test(n, 1e-4, 7, 1.0, False)),
    "range in stairs": (
        {**RANGE, "lr_range_test_step_rate": 0.3, "lr_range_test_staircase": True},
        lambda n: range_test(n, 1e-4, 7, 0.3, True),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rates_are_deepspeeds(name: str) -> None:
    settings, formula = CASES[name]
    wanted = [formula(update - 1) for update in range(UPDATES)]
    assert rates(build(settings)) == pytest.approx(wanted, rel=1e-12, abs=1e-18)


def test_written_out_by_hand() -> None:
    """WarmupLR from 0 to 1 over 4 steps, by the logarithm to base 4; then WarmupDecayLR from 1 to 0 over 4 more."""
    settings = {"warmup_max_lr": 1.0, "warmup_num_steps": 4}
    rising = [0.0, 0.0, 0.5, math.log(3) / math.log(4), 1.0]
    assert rates(build({"lr_schedule": "WarmupLR", **settings}))[:7] == pytest.approx([*rising, 1.0, 1.0])
    decay = build({"lr_schedule": "WarmupDecayLR", "total_num_steps": 8, **settings})
    assert rates(decay)[:11] == pytest.approx([*rising, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0])


def test_every_parameter_of_deepspeeds_is_a_setting() -> None:
    names = {name for names in PARAMETERS.values() for name in names}
    assert names == vars(DeepSpeedSchedulerConfig()).keys() - {"lr_schedule"}


@pytest.mark.parametrize("name", CASES)
def test_resume(name: str) -> None:
    settings, _ = CASES[name]
    state = build(settings).state(12 * BATCH)
    assert all(value is None or type(value) in (int, float, str, bool) for value in state.values())
    assert build(settings).load_state(state) == 12 * BATCH
    taken = build({}, use_checkpoint_opt_param_scheduler=True)
    taken.load_state(state)
    assert rates(taken) == rates(build(settings))


def test_another_schedule_is_refused_on_resume() -> None:
    state = build(CASES["log"][0]).state(8)
    with pytest.raises(ConfigError, match="--lr-schedule is None here and WarmupLR in the checkpoint"):
        build({}).load_state(state)
    with pytest.raises(ConfigError, match="--lr-schedule is WarmupLR here and None in the checkpoint"):
        build(CASES["log"][0]).load_state(build({}).state(8))
    with pytest.raises(ConfigError, match="--warmup-num-steps is 30 here and 20 in the checkpoint"):
        build({**CASES["log"][0], "warmup_num_steps": 30}).load_state(state)
    assert build(CASES["log"][0], lr=1e-1).load_state(state) == 8, "its rates do not depend on --lr"


def test_planted_bug_the_formula_of_the_update_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: uses last_batch_iteration as the update's own number, one step early."""
    of_update = module.DeepSpeedCurve.of_update
    monkeypatch.setattr(module.DeepSpeedCurve, "of_update", lambda self, update: of_update(self, update + 1))
    for name in ("log", "decay", "cosine", "cycle", "range"):
        with pytest.raises(AssertionError):
            test_rates_are_deepspeeds(name)
