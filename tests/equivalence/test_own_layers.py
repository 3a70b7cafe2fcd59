"""The layers in a user's own model: examples/own_layers.py trains the same in every layout."""

from __future__ import annotations

import re

import pytest

from tests.helpers.forked import launch_forked
from tests.helpers.runs import REPOSITORY

SCRIPT = REPOSITORY / "examples" / "own_layers.py"


def losses(ranks: int, tp: int, pp: int) -> list[float]:
    argv = ["--tensor-parallel", str(tp), "--pipeline-parallel", str(pp)]
    done = launch_forked(argv, ranks=ranks, script=SCRIPT)
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    found = losses(1, 1, 1)
    assert len(found) == 5 and found[-1] < found[0]
    return found


@pytest.mark.parametrize(("ranks", "tp", "pp"), [(2, 2, 1), (2, 1, 2), (4, 2, 2)])
def test_every_layout_prints_the_same_losses(ranks: int, tp: int, pp: int, alone: list[float]) -> None:
    assert losses(ranks, tp, pp) == pytest.approx(alone, rel=1e-10)
