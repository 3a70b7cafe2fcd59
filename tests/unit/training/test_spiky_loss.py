"""A sudden rise of the loss is reported once, with the samples that caused it."""

from __future__ import annotations

import math

import pytest

from megatron.training.spiky_loss import WINDOW, SpikyLoss


def told(losses: list[float], factor: float = 10.0) -> list[int]:
    spiky = SpikyLoss(factor)
    return [step for step, loss in enumerate(losses) if spiky.check(loss, step, 4 * step, 4 * step + 3)]


@pytest.mark.parametrize(
    ("losses", "steps"),
    [
        ([1.0, 2.0, 20.0, 20.1, 3.0], []),  # 20 is not more than ten times 2, and 20.1 comes after 20
        ([1.0, 2.0, 20.1, 20.1, 300.0], [2, 4]),
        ([math.nan, 1.0, math.inf, 11.0], [3]),  # numbers that are not finite are another check's
        ([30.0], []),  # nothing to compare with
        ([50.0] + [1.0] * WINDOW + [11.0], [WINDOW + 1]),  # the 50 is forgotten
        ([50.0] + [1.0] * (WINDOW - 1) + [11.0], []),
    ],
)
def test_which_losses_are_told(losses: list[float], steps: list[int]) -> None:
    assert told(losses) == steps


def test_the_warning_names_step_samples_and_what_it_was_compared_with() -> None:
    spiky = SpikyLoss(2.0)
    assert spiky.check(1.5, 1, 0, 7) == ""
    assert spiky.check(4.0, 2, 8, 15) == (
        "iteration 2: the loss rose to 4, more than 2 times the largest of the 1 losses before it (1.5); its samples "
        "are 8 to 15 of the training order (--check-for-spiky-loss)"
    )
