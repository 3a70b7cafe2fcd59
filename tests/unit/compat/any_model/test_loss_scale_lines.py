"""Messages about a loss scale that begins too high, tested with a scaler that overflows until 2^16."""

from __future__ import annotations

import re

import pytest

from megatron.compat.any_model.loss_scale_lines import SEVERAL, line_after_skips, lines_at_start
from megatron.config.sections.precision import PrecisionConfig
from megatron.optimizer import DynamicLossScaler


@pytest.mark.parametrize("hysteresis", [1, 2, 4])
@pytest.mark.parametrize("power", [4, 16, 19, 20, 24, 32, 126])
def test_the_numbers_are_those_of_a_run(power: int, hysteresis: int) -> None:
    precision = PrecisionConfig(fp16=True, initial_loss_scale=2.0**power, hysteresis=hysteresis)
    scaler = DynamicLossScaler(scale=2.0**power, hysteresis=hysteresis)
    skipped, said, scales = 0, "", []
    while scaler.scale > 2.0**16:
        scaler.update(overflow=True)
        scales.append(scaler.scale)
        skipped += 1
        if skipped == SEVERAL:
            said = line_after_skips(scaler.scale, precision)
    lines = list(lines_at_start(precision))
    assert len(lines) == (power > 19)
    if lines:
        assert f"begins at 2^{power}; about {skipped} updates are skipped until it is 2^16" in lines[0]
        halvings = len({*scales[SEVERAL - 1 :]}) - 1
        assert f"about {halvings} more halvings are likely" in said and "\n" not in said + lines[0]


def test_below_the_usual_scale_the_line_says_how_far_it_can_fall() -> None:
    precision = PrecisionConfig(fp16=True, min_loss_scale=3.0)
    said = line_after_skips(48.0, precision)
    assert "the loss scale is 48; at most 4 more halvings follow (min_loss_scale 3)" in said
    assert re.search(r'set "initial_scale_power": 5 in fp16$', said)
    assert not list(lines_at_start(PrecisionConfig(fp16=True, loss_scale=2.0**30)))
    assert not list(lines_at_start(PrecisionConfig(bf16=True)))
