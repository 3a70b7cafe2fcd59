"""The curves against independent closed forms in numpy, and the rules of a resumed run."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from megatron.config.sections.optimizer import OptimizerConfig, ScheduleConfig
from megatron.errors import ConfigError
from megatron.optimizer import Schedule, build_schedule
from megatron.optimizer import lr_schedule as module

BATCH, ITERS = 8, 100
SAMPLES = BATCH * ITERS


def build(optimizer: dict[str, Any] | None = None, *, by_samples: bool = False, **schedule: Any) -> Schedule:
    return build_schedule(
        ScheduleConfig(**{"lr": 1e-3, "min_lr": 1e-5, **schedule}),
        OptimizerConfig(**(optimizer or {})),
        global_batch_size=BATCH,
        train_iters=None if by_samples else ITERS,
        train_samples=SAMPLES if by_samples else None,
    )


def closed_form(
    style: str, n: np.ndarray, warm: float, decay: float, wsd: float = 0, wsd_style: str = ""
) -> np.ndarray:
    """min + (max - min) * shape, on the whole axis at once."""
    top, low = 1e-3, 1e-5
    position = (n - warm) / (decay - warm)
    tail = np.clip((n - (decay - wsd)) / wsd, 0, None) if wsd else np.zeros_like(n)
    shapes = {
        "linear": 1 - position,
        "cosine": (1 + np.cos(np.pi * position)) / 2,
        "linear tail": 1 - tail,
        "cosine tail": (1 + np.cos(np.pi * tail)) / 2,
        "exponential tail": 2 * np.exp(-np.log(2) * tail) - 1,
        "minus_sqrt tail": 1 - np.sqrt(tail),
    }
    with np.errstate(divide="ignore"):
        if style == "inverse-square-root":
            body = np.maximum(top * np.sqrt(max(warm, 1) / np.maximum(n, 1)), low)
        else:
            body = low + (top - low) * shapes[f"{wsd_style} tail" if style == "WSD" else style]
    body = np.where(n > decay, low, body)
    return np.where((n <= warm) & (warm > 0), top * n / warm if warm else 0.0, body)


@pytest.mark.parametrize("style", ["linear", "cosine", "inverse-square-root"])
@pytest.mark.parametrize(("warmup", "decay"), [(0, None), (10, None), (10, 60), (3, 90)])
def test_decays(style: str, warmup: int, decay: int | None) -> None:
    schedule = build(lr_decay_style=style, lr_warmup_iters=warmup, lr_decay_iters=decay)
    n = np.arange(0, SAMPLES + 50, dtype=float)
    wanted = closed_form(style, n, warmup * BATCH, (decay or ITERS) * BATCH)
    np.testing.assert_allclose([schedule.lr(x) for x in n], wanted, rtol=1e-12, atol=1e-18)


@pytest.mark.parametrize("wsd_style", ["exponential", "linear", "cosine", "minus_sqrt"])
def test_warmup_stable_decay(wsd_style: str) -> None:
    schedule = build(lr_decay_style="WSD", lr_warmup_iters=10, lr_wsd_decay_iters=20, lr_wsd_decay_style=wsd_style)
    n = np.arange(0, SAMPLES + 50, dtype=float)
    wanted = closed_form("WSD", n, 10 * BATCH, SAMPLES, 20 * BATCH, wsd_style)
    np.testing.assert_allclose([schedule.lr(x) for x in n], wanted, rtol=1e-12, atol=1e-18)
    assert schedule.lr(80 * BATCH) == pytest.approx(1e-3) and schedule.lr(SAMPLES) == pytest.approx(1e-5)


def test_constant() -> None:
    schedule = build(lr_decay_style="constant", lr_warmup_iters=10)
    assert [schedule.lr(n) for n in (40, 80, 81, 10 * SAMPLES)] == [5e-4, 1e-3, 1e-3, 1e-3]


def test_the_first_step_uses_the_value_at_zero_samples() -> None:
    assert build(lr_warmup_iters=10).lr(0) == 0.0
    assert build(lr_warmup_iters=10, lr_warmup_init=1e-4).lr(0) == 1e-4
    assert build().lr(0) == 1e-3


def test_warmup_from_an_initial_value() -> None:
    schedule = build(lr_warmup_iters=10, lr_warmup_init=1e-4)
    assert schedule.lr(40) == pytest.approx((1e-4 + 1e-3) / 2)


def test_warmup_as_a_share_of_the_decay() -> None:
    schedule = build(lr_warmup_fraction=0.01, lr_decay_iters=50)
    assert schedule.curves.lr_warmup_steps == 0.01 * 50 * BATCH
    assert schedule.lr(1) == pytest.approx(1e-3 / 4)


def test_lengths_in_samples_and_in_steps_are_the_same_curve() -> None:
    a = build(lr_decay_style="WSD", lr_warmup_iters=5, lr_decay_iters=90, lr_wsd_decay_iters=10)
    b = build(
        by_samples=True,
        lr_decay_style="WSD",
        lr_warmup_samples=5 * BATCH,
        lr_decay_samples=90 * BATCH,
        lr_wsd_decay_samples=10 * BATCH,
    )
    assert a.curves == b.curves


def test_weight_decay_ramp() -> None:
    assert build({"weight_decay": 0.1}).weight_decay(123) == 0.1
    ramp = {"start_weight_decay": 0.1, "end_weight_decay": 0.5}
    linear = build({**ramp, "weight_decay_incr_style": "linear"})
    cosine = build({**ramp, "weight_decay_incr_style": "cosine"})
    n = np.arange(0, SAMPLES + 50, dtype=float)
    share = np.clip(n / SAMPLES, 0, 1)
    np.testing.assert_allclose([linear.weight_decay(x) for x in n], 0.1 + 0.4 * share, rtol=1e-12)
    wanted = 0.1 + 0.4 * (1 - np.cos(np.pi * share)) / 2
    np.testing.assert_allclose([cosine.weight_decay(x) for x in n], wanted, rtol=1e-12)


def test_the_state_has_megatrons_keys() -> None:
    state = build(lr_warmup_iters=10).state(24)
    wanted = {
        "max_lr": 1e-3,
        "min_lr": 1e-5,
        "lr_warmup_steps": 80,
        "lr_decay_steps": 800,
        "lr_decay_style": "linear",
        "num_steps": 24,
        "start_wd": 0.01,
        "end_wd": 0.01,
        "wd_incr_style": "constant",
        "wd_incr_steps": 800,
    }
    assert {key: state[key] for key in wanted} == wanted
    assert all(value is None or type(value) in (int, float, str) for value in state.values())


def test_resume_with_the_same_settings() -> None:
    assert build().load_state(build().state(48)) == 48
    foreign = {key: value for key, value in build().state(16).items() if key not in ("init_lr", "wsd_decay_steps")}
    assert build().load_state(foreign) == 16


def test_resume_with_other_settings_is_refused_naming_each() -> None:
    state = build(lr_warmup_iters=10).state(48)
    with pytest.raises(ConfigError) as error:
        build({"weight_decay": 0.1}, lr=2e-3, lr_decay_style="cosine", lr_warmup_iters=20).load_state(state)
    message = str(error.value)
    for word in (
        "--lr is 0.002 here and 0.001 in the checkpoint",
        "--lr-decay-style is cosine here and linear",
        "warm-up length in samples",
        "--weight-decay",
        "--override-opt_param-scheduler",
        "--use-checkpoint-opt_param-scheduler",
    ):
        assert word in message
    assert "--min-lr" not in message and "\n" not in message


def test_training_longer_is_told_which_flag_continues_the_rate() -> None:
    saved = {**build(lr_decay_style="cosine").state(SAMPLES), "lr_decay_steps": SAMPLES // 2}
    for longer in ({}, {"lr_warmup_fraction": 0.1}):
        with pytest.raises(ConfigError, match=r"To train longer, give --override-opt_.* stays at 1e-05 after"):
            build(lr_decay_style="cosine", **longer).load_state(saved)
    for other in ({"lr": 2e-3}, {"lr_decay_iters": ITERS // 4}, {"lr_decay_style": "linear"}):
        with pytest.raises(ConfigError, match="Give --override-opt_param-scheduler to use the settings of this run"):
            build(**{"lr_decay_style": "cosine", **other}).load_state(saved)


def test_a_rate_of_zero_in_all_remaining_steps_is_warned_about() -> None:
    ended, step = range(SAMPLES, 2 * SAMPLES, BATCH), range(0, SAMPLES, BATCH)
    warning = build(min_lr=0.0).warning_at_zero(ended)
    assert warning is not None and warning.startswith("the learning rate is 0 in all ") and "--min-lr" in warning
    saved = build(min_lr=0.0, use_checkpoint_opt_param_scheduler=True).warning_at_zero(ended)
    assert saved is not None and "--override-opt_param-scheduler" in saved
    assert build(lr=0.0, min_lr=0.0).warning_at_zero(step) is not None
    for rates in ({}, {"min_lr": 0.0, "decoupled_lr": 1e-3, "decoupled_min_lr": 1e-4}):
        assert build(**rates).warning_at_zero(ended) is None
    assert build(min_lr=0.0, lr_warmup_iters=2).warning_at_zero(step) is None, "only the first is 0"


def test_settings_that_play_no_part_may_differ() -> None:
    state = build(lr_wsd_decay_style="cosine").state(8)
    assert build(lr_wsd_decay_style="linear").load_state({**state, "wd_incr_steps": 5}) == 8


def test_a_constant_rate_may_be_trained_on_for_longer() -> None:
    state = build(lr_decay_style="constant", lr_decay_iters=10).state(8)
    assert build(lr_decay_style="constant", lr_decay_iters=20).load_state(state) == 8
    with pytest.raises(ConfigError, match="--lr-decay-style"):
        build(lr_decay_style="cosine", lr_decay_iters=10).load_state(state)


def test_override_takes_what_is_given_here() -> None:
    schedule = build(lr=2e-3, override_opt_param_scheduler=True)
    assert schedule.load_state(build().state(48)) == 48
    assert schedule.curves == build(lr=2e-3).curves


def test_use_checkpoint_takes_what_was_saved() -> None:
    schedule = build(lr=2e-3, lr_decay_style="cosine", use_checkpoint_opt_param_scheduler=True)
    assert schedule.load_state(build(lr_warmup_iters=3).state(48)) == 48
    assert schedule.curves == build(lr_warmup_iters=3).curves


@pytest.mark.parametrize("style", ["linear", "cosine", "constant"])
def test_the_decoupled_rate_has_ends_of_its_own(style: str) -> None:
    both = build(lr_decay_style=style, lr_warmup_iters=10, decoupled_lr=5e-3, decoupled_min_lr=4e-4)
    alone = build(lr_decay_style=style, lr_warmup_iters=10, lr=5e-3, min_lr=4e-4)
    for n in range(0, SAMPLES + 50, 7):
        assert both.decoupled_lr(n) == alone.lr(n) and both.lr(n) == build(lr_decay_style=style, lr_warmup_iters=10).lr(
            n
        )
    assert build(decoupled_lr=5e-3).decoupled_lr(SAMPLES) == 1e-5, "without an end of its own it has --min-lr"
    assert build().decoupled_lr(8) is None


def test_another_decoupled_rate_is_refused_on_resume() -> None:
    with pytest.raises(ConfigError, match=r"--decoupled-lr is None here and 0\.005 in the checkpoint"):
        build().load_state(build(decoupled_lr=5e-3).state(8))


def test_planted_bug_an_anneal_that_misses_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: goes only half of the way down."""
    for style, wrong in {
        "exponential": lambda ratio: 0.5**ratio,
        "minus_sqrt": lambda ratio: 1 - 0.9 * math.sqrt(ratio),
        "linear": lambda ratio: 1 - ratio / 2,
        "cosine": lambda ratio: 0.5 * (math.cos(math.pi * ratio / 2) + 1),
    }.items():
        monkeypatch.setitem(module._SHAPES, style, wrong)
        with pytest.raises(AssertionError):
            test_warmup_stable_decay(style)


def test_planted_bug_a_sine_for_a_cosine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._SHAPES, "cosine", lambda ratio: 1 - math.sin(math.pi * ratio / 2))
    with pytest.raises(AssertionError):
        test_decays("cosine", 10, None)


def test_planted_bug_warmup_excluded_from_the_decay_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(curves: module.Curves, n: float) -> float:
        return module._SHAPES[curves.lr_decay_style]((n - curves.lr_warmup_steps) / curves.lr_decay_steps)

    monkeypatch.setitem(module.CURVES, "linear", module.Curve(module._falling(late)))
    with pytest.raises(AssertionError):
        test_decays("linear", 10, None)


def test_every_style_that_the_flag_takes_has_a_curve_and_its_parameters_are_settings() -> None:
    (choices,) = (one.metadata["flag"].choices for one in fields(ScheduleConfig) if one.name == "lr_decay_style")
    assert set(choices) == module.CURVES.keys()
    settings = {one.name for one in fields(module.Curves)}
    assert all(set(curve.parameters) <= settings for curve in module.CURVES.values())
