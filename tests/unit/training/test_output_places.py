"""--dry-run finds places that cannot be written to, leaves no file behind, and says what it did not check."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from megatron.training import dry_run
from tests.helpers.runs import flags, pretrain_here


@pytest.mark.parametrize(
    ("flag", "code"),
    [("save", 13), ("tensorboard_dir", 2), ("metrics_jsonl", 2)],
)
@pytest.mark.parametrize("place", ["/proc/x", "/proc/x/y/z"])
def test_a_place_that_takes_no_file(flag: str, code: int, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_here(flags(dry_run=True, **{flag: place})) == code
    said = capsys.readouterr().err
    assert f"--{flag.replace('_', '-')} {place}: cannot write in /proc (No such file or directory)" in said


def test_a_launch_ends_with_the_same_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_here(flags(save="/proc/x")) == 13
    capsys.readouterr()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o500)
    assert pretrain_here(flags(dry_run=True, save=tmp_path / "a" / "b")) == 13
    assert f"cannot write in {tmp_path} (Permission denied)" in capsys.readouterr().err


def test_nothing_is_left_behind_and_the_space_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tmp_path.stat().st_mtime_ns
    command = flags(dry_run=True, save=tmp_path / "new" / "run")
    assert pretrain_here(command) == 0
    shown = capsys.readouterr().out
    assert not list(tmp_path.iterdir()) and tmp_path.stat().st_mtime_ns == before
    assert f"free in {tmp_path}\n" in shown and shown.rstrip().endswith("\n".join(dry_run.NOT_CHECKED))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert pretrain_here(command) == 0
    assert f"1000 B free in {tmp_path}; too little space for one" in capsys.readouterr().out
