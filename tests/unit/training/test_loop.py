"""Training loop: when it stops, what it skips, and states from which it does not continue."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.errors import ConfigError, DataError, NonFiniteError
from megatron.training.exit import ExitRecord, StopReason
from megatron.training.hooks import Hook
from megatron.training.signals import SignalFlag
from megatron.training.skipped_steps import SkippedSteps
from tests.helpers.runs import Recorder, flags, make_parts, pretrain_here, train_here


def poison(parts: Any, at: int, value: float) -> None:
    """Replaces the loss of iteration `at` by `value`."""
    engine, forward = parts.engine, parts.engine.passes.forward_step
    calls = iter(range(1000))

    def wrong(model: Any, batch: Any) -> Any:
        total, count = forward(model, batch)
        return (total * value, count) if next(calls) // 4 + 1 == at else (total, count)

    engine.passes.forward_step = wrong


@pytest.mark.parametrize(("only", "stops"), [(None, True), ("SIGUSR1", False), ("SIGUSR2", True)])
def test_the_signal_that_saves_and_stops_can_be_chosen(only: str | None, stops: bool, tmp_path: Path) -> None:
    sent = signal.SIGUSR1 if only is None else signal.SIGUSR2
    heard: list[int] = []
    before = signal.signal(sent, lambda number, frame: heard.append(number))

    class Signalled(Hook):
        def before_iteration(self, iteration: int) -> None:
            if iteration == 2:
                os.kill(os.getpid(), sent)

    try:
        _, parts = make_parts(flags(exit_signal_handler=True, exit_signal=only), hooks=[Signalled()])
        with parts:
            reason = parts.trainer.fit()
    finally:
        signal.signal(sent, before)
    assert (reason.kind, parts.progress.iteration) == (("signal", 2) if stops else ("done", 6))
    assert heard == ([] if stops else [sent])


def test_exit_interval() -> None:
    result = train_here(flags(exit_interval=4))
    assert (len(result["records"]), result["reason"].kind) == (4, "exit_interval")


def test_a_multiple_of_the_exit_interval_at_the_end_is_the_end() -> None:
    assert train_here(flags(exit_interval=3, train_iters=3))["reason"].kind == "done"


def test_exit_duration() -> None:
    result = train_here(flags(exit_duration_in_mins=1e-9))
    assert (len(result["records"]), result["reason"].kind) == (1, "exit_duration")


def test_a_signal_ends_the_run_at_a_step_boundary_and_saves(tmp_path: Path) -> None:
    class Signalled(Hook):
        def before_iteration(self, iteration: int) -> None:
            if iteration == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    _, parts = make_parts(flags(exit_signal_handler=True, save=tmp_path, save_interval=100), hooks=[Signalled()])
    with parts:
        assert parts.trainer.fit().kind == "signal"
    assert parts.progress.iteration == 3
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "the handler goes when the run ends"


def test_ctrl_c_is_heard_twice_and_one_that_is_ignored_never() -> None:
    """Shells ignore SIGINT in background jobs."""
    before = signal.getsignal(signal.SIGINT)
    flag = SignalFlag((signal.SIGINT,))
    os.kill(os.getpid(), signal.SIGINT)
    assert flag.received == signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    flag.restore()
    assert signal.getsignal(signal.SIGINT) is before
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        flag = SignalFlag((signal.SIGINT,))
        os.kill(os.getpid(), signal.SIGINT)
        assert not flag.received
    finally:
        signal.signal(signal.SIGINT, before)


def test_saves_at_the_interval_and_at_the_end(tmp_path: Path) -> None:
    train_here(flags(save=tmp_path, save_interval=4))
    assert sorted(p.name for p in tmp_path.glob("iter_*")) == ["iter_0000004", "iter_0000006"]


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """(modification time, inode) of every checkpoint file."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in (".lock", "exit_reason.json")]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.stat().st_ino) for path in files}


def test_without_an_interval_there_is_one_save_at_the_end_and_a_restart_writes_it_once(tmp_path: Path) -> None:
    again = flags(save=tmp_path, load=tmp_path, cpu_threads=1)
    assert pretrain_here(again) == 0
    assert [p.name for p in tmp_path.glob("*iter_*")] == ["iter_0000006"]
    written = tree(tmp_path)
    assert pretrain_here(again) == 0 and tree(tmp_path) == written
    assert pretrain_here(flags(save=tmp_path, load=tmp_path, train_iters=8, lr_decay_iters=6, cpu_threads=1)) == 0
    assert sorted(p.name for p in tmp_path.glob("*iter_*")) == ["iter_0000006", "iter_0000008"]
    after = tree(tmp_path)
    assert {name: after[name] for name in written if "iter_0000006" in name} == {
        name: place for name, place in written.items() if "iter_0000006" in name
    }


@pytest.mark.parametrize(("flag", "warnings"), [("use_checkpoint", 1), ("override", 0)])
def test_a_longer_run_whose_rate_stays_at_zero_says_so(
    flag: str, warnings: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_here(flags(save=tmp_path, train_iters=3))
    assert "learning rate is 0" not in "".join(capsys.readouterr())
    longer = train_here(flags(load=tmp_path, **{f"{flag}_opt_param_scheduler": True}))
    assert "".join(capsys.readouterr()).count("warning: the learning rate is 0 in all remaining") == warnings
    assert any(record["learning_rate"] for record in longer["records"]) is (warnings == 0)


def test_an_end_ahead_of_time_saves_without_an_interval_too(tmp_path: Path) -> None:
    train_here(flags(save=tmp_path, exit_interval=4))
    assert [p.name for p in tmp_path.glob("iter_*")] == ["iter_0000004"]


def test_without_a_place_to_save_it_is_said_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(**changes: Any) -> bool:
        make_parts(flags(**changes))[1].closing.close()
        return "no --save: the weights are lost" in capsys.readouterr().out

    assert told()
    assert not told(save=tmp_path) and not told(skip_train=True)
    train_here(flags(save=tmp_path))
    assert not told(load=tmp_path), "this run has ended, and trains nothing"


ALL = "8 of 8 steps were skipped.*: nothing was learnt"
FP16 = {"fp16": True, "train_iters": 8, "eval_iters": 0, "cpu_threads": 1}


@pytest.mark.parametrize(
    ("changes", "skipped"),
    [
        ({"initial_loss_scale": 2.0**60, "hysteresis": 1}, ALL),
        (
            {"loss_scale": 2.0**60, "no_check_for_nan_in_loss_and_grad": True},
            ALL,
        ),
        ({"initial_loss_scale": 256.0}, None),
    ],
)
def test_a_run_that_skipped_its_steps_says_so_at_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], skipped: str | None
) -> None:
    assert pretrain_here(flags(**FP16, save=tmp_path, **changes)) == 0
    told = re.findall(r"warning: (.*steps were skipped.*)", capsys.readouterr().out)
    record = json.loads((tmp_path / "exit_reason.json").read_text())
    assert (record["reason"], record["text"]) == ("done", "all iterations are done")
    assert told == ([record["warning"]] if skipped else []) and ("warning" in record) is bool(skipped)
    assert skipped is None or re.search(skipped, told[0])


def counted(skipped: SkippedSteps, pattern: str, interval: int = 20) -> list[bool]:
    """One letter per step, x for a skipped one. Returns whether each log line had a warning."""
    told = []
    for number, letter in enumerate(pattern, 1):
        skipped.count(letter == "x", loss_scale=2.0)
        if number % interval == 0:
            told.append(bool(skipped.since_last_asked()))
    return told


@pytest.mark.parametrize(
    ("pattern", "told", "at_the_end"),
    [
        ("x" * 32 + "." * 368, [False] * 20, False),  # the search for the first scale, 8 % of the steps
        ("x" * 32 + "." * 200, [False] * 11, True),  # 14 %
        ("." * 60 + "x" * 40, [False] * 3 + [True, False], True),  # one line per streak
        ("." * 60 + "x.." * 20 + "." * 40 + "x" * 20, [False] * 3 + [True, False, False, False, False, True], True),
        (("." * 19 + "x") * 10, [False] * 10, False),  # 5 %: doublings that were too much
        ("x" * 60, [False, False, True], True),
    ],
)
def test_many_skipped_steps_are_told_in_the_log(pattern: str, told: list[bool], at_the_end: bool) -> None:
    skipped = SkippedSteps()
    assert counted(skipped, pattern) == told
    assert bool(skipped.of_the_run()) is at_the_end


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "holds 3 steps (iter_0000002 to iter_0000006) newer than iteration 0, where this run starts"),
        ({"load": "SAVE", "finetune": True}, "holds 3 steps (iter_0000002 to iter_0000006)"),
        ({"load": "SAVE", "ckpt_step": 4}, "holds 1 step (iter_0000006) newer than iteration 4, where this run starts"),
        ({"load": "SAVE"}, None),
        ({"save": "OTHER"}, None),
        ({"load": "SAVE", "ckpt_step": 4, "skip_train": True}, None),
    ],
)
def test_steps_that_the_first_save_renames_are_named_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], said: str | None
) -> None:
    folders = {"SAVE": str(tmp_path / "first"), "OTHER": str(tmp_path / "other")}
    train_here(flags(save=folders["SAVE"], save_interval=2))
    capsys.readouterr()
    places = {name: folders.get(str(value), value) for name, value in {"save": "SAVE", **changes}.items()}
    _, parts = make_parts(flags(save_interval=2, **places))
    parts.closing.close()
    warned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: --save")]
    assert len(warned) == (said is not None)
    if said is not None:
        assert all(part in warned[0] for part in (said, "abandoned-", "--load", "another --save"))


def test_skipped_iterations_consume_their_data() -> None:
    whole = train_here(flags(lr_decay_style="constant", weight_decay=0, lr=0.0))["records"]
    skipping = train_here(flags(lr_decay_style="constant", weight_decay=0, lr=0.0, iterations_to_skip=[2, 3]))
    kept = {r["iteration"]: r["lm_loss"] for r in skipping["records"]}
    assert set(kept) == {1, 4, 5, 6}
    assert skipping["parts"].progress.consumed_train_samples == 48
    # With a learning rate of 0 the loss depends only on the samples and on dropout's random numbers.
    assert kept[1] == whole[0]["lm_loss"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_before_the_update(value: float) -> None:
    _, parts = make_parts(flags())
    poison(parts, at=3, value=value)
    with pytest.raises(NonFiniteError, match=r"iteration 3: the loss is (nan|inf) \(rank 0: samples 16, 17"), parts:
        parts.trainer.fit()
    assert all(torch.isfinite(p).all() for p in parts.engine.model.parameters())


def test_a_bad_gradient_is_named() -> None:
    _, parts = make_parts(flags())
    parameter = dict(parts.engine.model.named_parameters())["layers.1.mlp.dense_4h_to_h.weight"]
    parameter.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(NonFiniteError, match=r"layers\.1\.mlp\.dense_4h_to_h\.weight"), parts:
        parts.trainer.fit()


def test_without_the_check_bad_steps_are_skipped_and_counted() -> None:
    records: list[Any] = []
    _, parts = make_parts(flags(no_check_for_nan_in_loss_and_grad=True), hooks=[Recorder(records)])
    poison(parts, at=3, value=float("nan"))
    with parts:
        parts.trainer.fit()
    assert [r["nan_iterations"] for r in records] == [0, 0, 1, 0, 0, 0]
    assert [r["skipped_iterations"] for r in records] == [0, 0, 1, 0, 0, 0]
    assert all(torch.isfinite(p).all() for p in parts.engine.model.parameters())


def test_a_skipped_step_does_not_move_the_schedule() -> None:
    rates = [r["learning_rate"] for r in train_here(flags())["records"]]
    records: list[Any] = []
    _, parts = make_parts(flags(no_check_for_nan_in_loss_and_grad=True), hooks=[Recorder(records)])
    poison(parts, at=1, value=float("nan"))
    with parts:
        parts.trainer.fit()
    assert [r["learning_rate"] for r in records] == [rates[0], *rates[:5]]


def test_a_batch_without_counted_tokens_is_refused() -> None:
    _, parts = make_parts(flags())
    forward = parts.engine.passes.forward_step
    parts.engine.passes.forward_step = lambda model, batch: tuple(0 * x for x in forward(model, batch))  # type: ignore
    with pytest.raises(DataError, match="every loss mask is zero"), parts:
        parts.trainer.fit()


def test_no_initialization_needs_weights() -> None:
    with pytest.raises(ConfigError, match=r"--no-initialization.*--load"):
        make_parts(flags(no_initialization=True))


def test_the_reason_of_the_end_is_written_beside_the_checkpoints(tmp_path: Path) -> None:
    ExitRecord(tmp_path, 0).ended(StopReason("signal", "SIGTERM"), iteration=7)
    record = json.loads((tmp_path / "exit_reason.json").read_text())
    assert record == {"reason": "signal", "text": "SIGTERM", "exit_code": 0, "iteration": 7}
