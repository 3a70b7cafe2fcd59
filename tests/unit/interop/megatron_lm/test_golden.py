"""Reads stored files of both generations of Megatron-LM."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.checkpoint.found_step import FoundStep
from tests.helpers.golden_megatron import GOLDEN, ROWS, model, weights, write_all
from tests.helpers.megatron_lm import with_moments
from tests.helpers.other_programs import find_checkpoint
from tests.unit.checkpoint.support import one_process

KINDS = ("23.06", "core", "torch_dist")


def opened(directory: Path) -> FoundStep:
    found = find_checkpoint(directory, parallel=one_process(), log=lambda text: None)
    assert found is not None
    return found.with_vocabulary(ROWS)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_that_were_written(kind: str) -> None:
    found, expected = opened(GOLDEN / kind), weights()
    assert found.manifest.step == 500 and found.manifest.model.keys() == expected.keys()
    for name, record in found.manifest.model.items():
        assert torch.equal(found.reader().logical(name, record), expected[name]), name


def test_moments_of_the_earlier_generation() -> None:
    found, moments = opened(GOLDEN / "23.06"), with_moments(model()).moments
    assert found.manifest.optimizer.keys() == moments.keys()
    for name, kinds in found.manifest.optimizer.items():
        for kind, record in kinds.items():
            assert torch.equal(found.reader().logical(name, record), moments[name][kind]), (name, kind)


def test_the_script_that_wrote_them_still_writes_them(tmp_path: Path) -> None:
    write_all(tmp_path)
    for kind in KINDS:
        files = {path.relative_to(GOLDEN) for path in (GOLDEN / kind).rglob("*") if path.is_file()}
        assert files == {path.relative_to(tmp_path) for path in (tmp_path / kind).rglob("*") if path.is_file()}
