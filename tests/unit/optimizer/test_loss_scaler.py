"""The loss scale, compared with sequences worked out by hand from Megatron's rules."""

from __future__ import annotations

from megatron.config.sections.precision import PrecisionConfig
from megatron.optimizer import ConstantLossScaler, DynamicLossScaler, build_loss_scaler

GOOD, BAD = False, True


def scales(scaler: DynamicLossScaler, events: list[bool]) -> list[float]:
    found = []
    for overflow in events:
        scaler.update(overflow)
        found.append(scaler.scale)
    return found


def test_one_overflow_is_forgiven_the_second_halves() -> None:
    scaler = DynamicLossScaler(scale=16, window=1000, hysteresis=2)
    assert scales(scaler, [BAD, GOOD, BAD, BAD, GOOD, BAD]) == [16, 16, 8, 4, 4, 2]


def test_only_a_doubling_refills_the_hysteresis() -> None:
    scaler = DynamicLossScaler(scale=16, window=2, hysteresis=2)
    assert scales(scaler, [BAD, BAD, GOOD, GOOD, BAD, BAD]) == [16, 8, 8, 16, 16, 8]


def test_consecutive_overflows_alone_use_up_the_hysteresis() -> None:
    """Tests DeepSpeed's `consecutive_hysteresis`: a good step refills it."""
    scaler = DynamicLossScaler(scale=16, window=1000, hysteresis=2, consecutive_hysteresis=True)
    assert scales(scaler, [BAD, GOOD, BAD, GOOD, BAD, BAD, BAD, GOOD, BAD]) == [16, 16, 16, 16, 16, 8, 4, 4, 4]


def test_an_overflow_starts_the_window_anew() -> None:
    scaler = DynamicLossScaler(scale=4, window=3, hysteresis=9)
    assert scales(scaler, [GOOD, GOOD, BAD, GOOD, GOOD, GOOD]) == [4, 4, 4, 4, 4, 8]


def test_floor() -> None:
    scaler = DynamicLossScaler(scale=4, min_scale=1, hysteresis=1)
    assert scales(scaler, [BAD] * 5) == [2, 1, 1, 1, 1]


def test_defaults_are_megatrons() -> None:
    scaler = build_loss_scaler(PrecisionConfig(fp16=True))
    assert scaler == DynamicLossScaler(scale=2.0**32, min_scale=1.0, window=1000, hysteresis=2)
    found = scales(scaler, [GOOD] * 1000)
    assert found[998] == 2.0**32 and found[999] == 2.0**33


def test_a_state_goes_on_where_it_was() -> None:
    events = [GOOD, BAD, GOOD, GOOD, BAD, GOOD, GOOD, GOOD, BAD, BAD, GOOD] * 3
    whole = DynamicLossScaler(scale=64, window=3)
    expected = scales(whole, events)
    for stop in range(len(events)):
        first = DynamicLossScaler(scale=64, window=3)
        scales(first, events[:stop])
        second = DynamicLossScaler(scale=64, window=3)
        second.load_state(first.state())
        assert scales(second, events[stop:]) == expected[stop:]


def test_which_scaler() -> None:
    assert build_loss_scaler(PrecisionConfig()) == ConstantLossScaler(1.0)
    assert build_loss_scaler(PrecisionConfig(bf16=True)) == ConstantLossScaler(1.0)
    assert build_loss_scaler(PrecisionConfig(fp16=True, loss_scale=128.0)) == ConstantLossScaler(128.0)


def test_a_constant_scale_never_moves_and_is_no_state() -> None:
    scaler = ConstantLossScaler(8.0)
    for overflow in (BAD, GOOD, BAD):
        scaler.update(overflow)
    scaler.load_state({"scale": 2.0, "growth_tracker": 1, "hysteresis_tracker": 1})
    assert scaler.scale == 8.0 and scaler.state() == {}
    dynamic = DynamicLossScaler(scale=32)
    dynamic.load_state(scaler.state())
    assert dynamic.scale == 32
