"""Resumes steps of schema 3 as the last version with that schema would: from the newest of any kind. That version wrote
them (tests/golden/make_schema_3.py). Covers `megatron/checkpoint/` and `local/`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron.checkpoint.verify import inspect_step
from tests.golden.make_schema_3 import KINDS, NEWEST, RANKS, STOPS_AFTER, command, digests, train
from tests.helpers.distributed import run_ranks

GOLDEN = Path(__file__).parents[1] / "golden"
NEAR = 2e-4  # of a loss: other processors add in another order


def expected(kind: str, part: str) -> dict[str, str]:
    return json.loads((GOLDEN / kind / "expected.json").read_bytes())[part]


def resumed(kind: str, folder: Path, *more: str) -> tuple[int, dict[str, str]]:
    shutil.copytree(GOLDEN / kind, folder, dirs_exist_ok=True)
    found = run_ranks(RANKS, train, folder, [*command(kind), *more], None, timeout=120.0)
    assert found[0][0] == found[1][0]
    return found[0]


def differs(found: dict[str, str], wanted: dict[str, str]) -> bool:
    return any(abs(float(loss) / float(wanted[step]) - 1) > NEAR for step, loss in found.items())


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_is_that_which_was_saved(kind: str) -> None:
    step = GOLDEN / kind / NEWEST[kind]
    record, problems = inspect_step(step, deep=True)
    assert problems == [] and record is not None and record.divisions
    assert b'"schema": 3' in (step / "manifest.json").read_bytes()
    assert digests(step) == expected(kind, "tensors")


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_stopped_between_saves_goes_on_from_there(kind: str, tmp_path: Path) -> None:
    start, losses = resumed(kind, tmp_path)
    assert (start, list(losses)) == (STOPS_AFTER, ["4", "5", "6"])
    assert not differs(losses, expected(kind, "losses"))


@pytest.mark.parametrize("flag", ["--no-load-optim", "--no-load-rng"])
def test_planted_bug_a_part_of_the_state_is_lost(flag: str, tmp_path: Path) -> None:
    _, losses = resumed("local_schema_3", tmp_path, flag)
    assert differs(losses, expected("local_schema_3", "losses"))
