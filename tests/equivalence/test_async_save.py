"""Runs with --async-save: what they save during training equals the saves of other runs bit for bit, and they end
alike."""

from __future__ import annotations

import errno
import io
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpoint import manifest
from megatron.checkpoint.background import HostMemory
from megatron.checkpoint.content import RankContent
from megatron.checkpoint.reader import StepReader
from megatron.checkpoint.save import Save
from megatron.checkpoint.storage import HashingFile
from megatron.checkpoint.verify import inspect_step
from megatron.training.hooks import Hook
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import Recorder, flags, make_parts, pretrain_here
from tests.helpers.step_tensors import model_tensors

SETTINGS: dict[str, Any] = {
    "bf16": True,
    "optimizer": "adam",
    "train_iters": 6,
    "hidden_dropout": 0.1,
    "save_interval": 2,
}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"zero_stage": 1}),
    (2, {"zero_stage": 3}),
    (4, {"tensor_model_parallel_size": 2, "exit_signal_handler": True}),
]


class WritesLater(Hook):
    """Delays the write of the save after iteration 2 until iteration 4 begins."""

    def __init__(self) -> None:
        self._go, self.held = Event(), 0

    def before_iteration(self, iteration: int) -> None:
        if iteration == 4:
            self._go.set()

    @contextmanager
    def holding(self) -> Iterator[None]:
        write = Save.write

        def waiting(save: Save, content: RankContent, stop: Event | None = None) -> None:
            self.held += not self._go.is_set()
            assert self._go.wait(60)
            write(save, content, stop)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Save, "write", waiting)
            yield


def run(rank: int, ranks: int, argv: list[str], late: bool = False) -> list[str]:
    """Losses of the run."""
    torch.set_num_threads(1)
    records: list[dict[str, Any]] = []
    later = WritesLater()
    _, parts = make_parts(argv, hooks=[Recorder(records), later], rank=rank, world_size=ranks)
    with later.holding() if late else nullcontext(), parts:
        parts.trainer.fit()
    assert later.held == late, "training never went on beside a save"
    return [repr(record["lm_loss"]) for record in records]


def tensors_of(step: Path) -> dict[str, Tensor]:
    reader = StepReader(step, manifest.read(step))
    found = model_tensors(reader)
    for name, kinds in reader.manifest.optimizer.items():
        found |= {f"{name} {kind}": reader.logical(name, record) for kind, record in kinds.items()}
    return found


def same(ours: Path, theirs: Path) -> bool:
    first, second = tensors_of(ours), tensors_of(theirs)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("ranks", "axes"), LAYOUTS)
def test_what_is_saved_meanwhile_is_what_others_save(ranks: int, axes: dict[str, Any], tmp_path: Path) -> None:
    settings = {**SETTINGS, **axes}
    plain = run_ranks(ranks, run, ranks, flags(**settings, save=tmp_path / "plain"), timeout=120.0)
    ours = flags(**settings, save=tmp_path / "ours", async_save=True)
    assert run_ranks(ranks, run, ranks, ours, True, timeout=120.0) == plain
    for step in (2, 4, 6):
        name = f"iter_000000{step}"
        assert inspect_step(tmp_path / "ours" / name, deep=True)[1] == []
        assert same(tmp_path / "ours" / name, tmp_path / "plain" / name), step
    again = run_ranks(ranks, run, ranks, flags(**settings, load=tmp_path / "ours", ckpt_step=4, save=tmp_path / "new"))
    assert [losses[4:] for losses in plain] == again


def test_planted_bug_what_is_saved_is_what_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMemory, "copy", lambda self, tensor: tensor.detach())
    with pytest.raises(AssertionError, match=r"assert False|same"):
        test_what_is_saved_meanwhile_is_what_others_save(1, {}, tmp_path)


def test_a_failed_write_ends_the_run_with_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = HashingFile.write

    def full(self: HashingFile, data: Any) -> int:
        if "iter_0000004" in str(self._file.name):
            raise OSError(errno.ENOSPC, "No space left on device", self._file.name)
        return write(self, data)

    monkeypatch.setattr(HashingFile, "write", full)
    assert pretrain_here(flags(**{**SETTINGS, "train_iters": 20}, save=tmp_path, async_save=True)) == 13
    said = capsys.readouterr()
    assert "No space left on device" in said.err and "earlier checkpoints are untouched" in said.err
    assert '"exit_code": 13' in (tmp_path / "exit_reason.json").read_text()
    assert said.out.count("successfully saved") == 1 and not list(tmp_path.glob(".tmp-iter*"))
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_the_log_calls_saved_what_is_on_disk(tmp_path: Path) -> None:
    stream, steps = io.StringIO(), []

    class Looks(Hook):
        def after_iteration(self, iteration: int) -> None:
            steps.append(
                (stream.getvalue().count("successfully saved"), len(list(tmp_path.glob("iter_*/manifest.json"))))
            )

    settings = {**SETTINGS, "save_interval": 1, "save": tmp_path, "async_save": True}
    with redirect_stdout(stream):
        _, parts = make_parts(flags(**settings), hooks=[Looks()])
        with parts:
            parts.trainer.fit()
    assert all(told <= there for told, there in steps), steps
    assert stream.getvalue().count("successfully saved") == len(list(tmp_path.glob("iter_*"))) == 6
    assert "training waited" in stream.getvalue()
