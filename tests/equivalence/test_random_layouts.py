"""tools/check_layout.py on random configurations: each trains what one process trains, or is rejected with the name of
a flag. Runs a few seeds; `python -m tests.helpers.random_layouts FIRST COUNT` runs any number."""

from __future__ import annotations

import pytest

from megatron.cli.check_layout import main
from tests.helpers.random_layouts import random_settings, words

Capture = pytest.CaptureFixture[str]
SEEDS = (10, 14, 25)


@pytest.mark.parametrize("seed", SEEDS)
def test_equal(seed: int, capsys: Capture) -> None:
    assert main(words(seed)) == 0, (random_settings(seed), capsys.readouterr())
    assert "EQUAL within 1e-10" in capsys.readouterr().out


def test_the_seeds_are_of_every_kind() -> None:
    drawn = [random_settings(seed) for seed in SEEDS]
    for axis in ("tensor_model", "pipeline_model", "context", "expert_model"):
        assert any(settings.get(f"{axis}_parallel_size", 1) > 1 for settings in drawn), axis
    for option in ("sequence_parallel", "num_experts", "recompute_granularity", "num_query_groups"):
        assert any(settings.get(option) for settings in drawn), option


@pytest.mark.parametrize(("seed", "flag"), [(6, "--cp-comm-type a2a"), (26, "--num-query-groups 3")])
def test_refused_by_name(seed: int, flag: str, capsys: Capture) -> None:
    assert main(words(seed)) == 2
    said = capsys.readouterr().err
    assert flag in said and len(said.splitlines()) == 1, said
