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
from megatron.utils.device import human_bytes
from tests.helpers.runs import flags, pretrain_here, train_here
from tests.unit.tokenizer.support import write_small_bpe

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


@pytest.mark.parametrize("changes", [{}, {"bf16": True, "num_layers": 4}, {"no_save_optim": True}], ids=str)
def test_the_size_of_a_small_checkpoint_is_estimated_with_its_headers(
    changes: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are a small part of it: a tensor has about 900 bytes besides."""
    estimates: list[float] = []
    needs: list[int] = []
    monkeypatch.setattr(dry_run, "space_for", lambda size, save: estimates.append(size) or human_bytes(size))
    monkeypatch.setattr("megatron.checkpoint.save.Save._check_space", lambda save, need: needs.append(need))
    assert pretrain_here(flags(save=tmp_path, dry_run=True, train_iters=1, **changes)) == 0
    train_here(flags(save=tmp_path, train_iters=1, **changes))
    files = [path for path in next(tmp_path.glob("iter_*")).rglob("*") if path.is_file()]
    real = sum(path.stat().st_size for path in files)
    assert 0.97 * real < estimates[0] < 1.15 * real, (estimates, real)
    assert 0.97 * real < needs[0] < 1.15 * real, (needs, real)


def test_the_size_of_a_checkpoint_has_the_tokenizers_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    estimates: list[float] = []
    monkeypatch.setattr(dry_run, "space_for", lambda size, save: estimates.append(size) or human_bytes(size))
    (tmp_path / "files").mkdir()
    vocab, merges = write_small_bpe(tmp_path / "files")
    tokenizer = {"vocab_size": None, "tokenizer_type": "GPT2BPETokenizer", "vocab_file": vocab, "merge_file": merges}
    run = {"save": tmp_path / "run", "train_iters": 1, **tokenizer}
    assert pretrain_here(flags(**run, dry_run=True)) == 0
    assert pretrain_here(flags(**run, dry_run=True, no_save_tokenizer_assets=True)) == 0
    size = vocab.stat().st_size + merges.stat().st_size
    assert 0.5 * size < estimates[0] - estimates[1] < 6 * size, (estimates, size)
