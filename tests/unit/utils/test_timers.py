from __future__ import annotations

import pytest

from megatron.utils.timers import Timers, human_duration, render_times


def test_timers_add_up_and_reset() -> None:
    timers = Timers()
    for _ in range(2):
        with timers("a"):
            pass
    assert list(timers.elapsed()) == ["a"] and timers.elapsed()["a"] >= 0
    timers.reset()
    assert timers.elapsed() == {}


@pytest.mark.parametrize(
    ("option", "text"),
    [("max", ": 4.00"), ("minmax", ": (2.00, 4.00)"), ("all", ": rank 0: 2.00, rank 1: 4.00")],
)
def test_times_over_ranks(option: str, text: str) -> None:
    lines = render_times([{"optimizer": 0.002}, {"optimizer": 0.004}], option).splitlines()
    assert len(lines) == 2
    assert lines[1].lstrip().startswith("optimizer ") and lines[1].endswith(text)


@pytest.mark.parametrize(
    ("seconds", "text"), [(5, "00:00:05"), (3725, "01:02:05"), (90000, "1d 01:00:00"), (-1, "00:00:00")]
)
def test_durations(seconds: float, text: str) -> None:
    assert human_duration(seconds) == text
