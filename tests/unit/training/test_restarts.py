"""A launcher's restarts end when they make no progress; a start by hand always goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.distributed.launch import LaunchInfo
from megatron.errors import NoProgressError
from megatron.training.exit import ExitRecord
from megatron.training.restarts import FILE, count_start

TORCHRUN = LaunchInfo(launcher="torchrun", run_id="job")


def start(directory: Path, attempt: int, launch: LaunchInfo = TORCHRUN) -> None:
    count_start(directory, replace(launch, attempt=attempt))


def test_the_fourth_start_without_a_new_step_is_refused_with_the_reason_of_the_last(tmp_path: Path) -> None:
    (tmp_path / "iter_0000100").mkdir()
    for attempt in range(3):
        start(tmp_path, attempt)
    record = ExitRecord(tmp_path, 0)
    record.failed(ValueError("the cause"))
    with pytest.raises(NoProgressError) as refused:
        start(tmp_path, 3)
    text = str(refused.value)
    assert refused.value.exit_code == 19 and "no checkpoint after iteration 100" in text
    assert "The last start: ValueError: the cause." in text and "manually" in text
    record.failed(refused.value)  # the launcher does not know, and goes on
    with pytest.raises(NoProgressError) as again:
        start(tmp_path, 4)
    assert str(again.value) == text


def test_a_new_step_another_launch_and_a_start_by_hand_go_on(tmp_path: Path) -> None:
    for attempt in range(3):
        start(tmp_path, attempt)
    start(tmp_path, 7, replace(TORCHRUN, run_id="another"))
    start(tmp_path, 3)
    for attempt in (4, 5):
        start(tmp_path, attempt)
    (tmp_path / "iter_0000010").mkdir()
    start(tmp_path, 6)
    start(tmp_path, 7)
    start(tmp_path, 8)
    start(tmp_path, 0)
    start(tmp_path, 1)


def test_a_non_persistent_step_is_progress(tmp_path: Path) -> None:
    for attempt in range(9):
        count_start(tmp_path, replace(TORCHRUN, attempt=attempt), [100 + attempt // 3])


def test_nothing_was_saved_or_said(tmp_path: Path) -> None:
    for attempt in range(3):
        start(tmp_path, attempt)
    with pytest.raises(NoProgressError, match=r"no checkpoint at all, .* ended without an error message"):
        start(tmp_path, 3)


@pytest.mark.parametrize("content", ["", "[]", "{", json.dumps({"run_id": 1}), json.dumps({"number": "x"})])
def test_a_damaged_note_is_a_first_start(content: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(content)
    start(tmp_path, 3)
    assert json.loads((tmp_path / FILE).read_text())["number"] == 1
