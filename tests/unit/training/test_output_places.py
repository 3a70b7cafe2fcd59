"""--dry-run finds places that cannot be written to, leaves no file behind, and says what it did not check."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from megatron.config import RunConfig, parse_args
from megatron.errors import StorageError
from megatron.training import dry_run
from megatron.training.output_places import check_output_places
from tests.helpers.runs import flags, pretrain_here

PROFILED = {"profile_dir": {"profile": True, "profile_step_start": 0, "profile_step_end": 1}}


@pytest.mark.parametrize(
    ("flag", "code"),
    [("save", 13), ("tensorboard_dir", 2), ("profile_dir", 2), ("metrics_jsonl", 2), ("data_table_path", 2)],
)
@pytest.mark.parametrize("place", ["/proc/x", "/proc/x/y/z"])
def test_a_place_that_takes_no_file(flag: str, code: int, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_here(flags(dry_run=True, **PROFILED.get(flag, {}), **{flag: place})) == code
    said = capsys.readouterr().err
    assert f"--{flag.replace('_', '-')} {place}: cannot write in /proc (No such file or directory)" in said


def test_a_launch_ends_with_the_same_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_here(flags(save="/proc/x")) == 13
    capsys.readouterr()


def test_a_folder_without_permission() -> None:
    """Root may write everywhere, so another user asks."""
    config = parse_args(flags())
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        config = replace(config, checkpoint=replace(config.checkpoint, save=f"{folder}/a/b"))
        process = multiprocessing.get_context("fork").Process(target=_rejected_for_another_user, args=(config, folder))
        process.start()
        process.join(60)
    assert process.exitcode == 0


def _rejected_for_another_user(config: RunConfig, folder: str) -> None:
    if os.geteuid() == 0:
        os.seteuid(65534)
    with pytest.raises(StorageError) as raised:
        check_output_places(config)
    assert str(raised.value) == f"--save {folder}/a/b: cannot write in {folder} (Permission denied); name another place"


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
