"""A resumed run equals an uninterrupted one bit for bit: losses, norms and weights, with dropout and accumulation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.data.indexed.builder import IndexedDatasetBuilder
from tests.helpers.forked import launch_forked
from tests.helpers.runs import flags, read_metrics, same_numbers, train_here

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True, "initial_loss_scale": 2.0**21, "loss_scale_window": 2},
}


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """70 short documents, fewer than the 48 samples of a run use: it takes more than one epoch."""
    random = np.random.RandomState(7)
    prefix = tmp_path / "corpus"
    builder = IndexedDatasetBuilder(str(prefix), np.uint16)
    for _ in range(70):
        builder.add_document(random.randint(0, 96, size=random.randint(1, 17)).astype(np.uint16), None)
    builder.finalize()
    return str(prefix)


def run_in_pieces(stops: list[int], **settings: Any) -> dict[str, Any]:
    """Repeats the command, as a user restarts it; returns the log of all pieces and the last weights."""
    records: list[dict[str, Any]] = []
    for stop in stops:
        result = train_here(flags(**settings, exit_interval=stop))
        records += result["records"]
    result = train_here(flags(**settings))
    return {"records": records + result["records"], "weights": result["weights"]}


def assert_same(pieces: dict[str, Any], whole: dict[str, Any]) -> None:
    assert [same_numbers(r) for r in pieces["records"]] == [same_numbers(r) for r in whole["records"]]
    for name, expected in whole["weights"].items():
        assert torch.equal(pieces["weights"][name], expected), name


@pytest.mark.parametrize("precision", PRECISIONS)
def test_two_resumes_equal_no_stop(tmp_path: Path, corpus: str, precision: str) -> None:
    settings = {
        **PRECISIONS[precision],
        "mock_data": None,
        "data_path": corpus,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": 96,
        "lr_warmup_iters": 2,
        "lr_decay_style": "cosine",
    }
    whole = train_here(flags(**settings))
    assert len(whole["records"]) == 6
    if precision == "fp16":
        assert any(record["skipped_iterations"] for record in whole["records"]), "the overflow is to be resumed over"
    save = str(tmp_path / "ckpt")
    pieces = run_in_pieces([2, 5], **settings, save=save, load=save, save_interval=100)
    assert_same(pieces, whole)


def test_resume_in_the_middle_of_a_batch_size_ramp(tmp_path: Path) -> None:
    settings = {"train_iters": None, "train_samples": 40, "rampup_batch_size": [2, 2, 16], "global_batch_size": 6}
    whole = train_here(flags(**settings))
    assert {record["global_batch_size"] for record in whole["records"]} == {2, 4, 6}
    save = str(tmp_path / "ckpt")
    assert_same(run_in_pieces([3], **settings, save=save, load=save, save_interval=100), whole)


def test_two_ranks_resume(tmp_path: Path) -> None:
    """Each rank's own random stream is in the checkpoint."""
    save, whole, pieces = str(tmp_path / "ckpt"), tmp_path / "whole.jsonl", tmp_path / "pieces.jsonl"
    for metrics, extra in (
        (whole, {}),
        (pieces, {"save": save, "load": save, "save_interval": 100, "exit_interval": 4}),
        (pieces, {"save": save, "load": save, "save_interval": 100}),
    ):
        done = launch_forked(flags(metrics_jsonl=metrics, **extra), ranks=2)
        assert done.returncode == 0, done.stderr
    expected = [same_numbers(record) for record in read_metrics(whole)]
    assert len(expected) == 6
    assert [same_numbers(record) for record in read_metrics(pieces)] == expected


def test_two_ranks_pass_over_a_damaged_step(tmp_path: Path) -> None:
    """Damage that is found while the step is read ends the set-up of the run; a second set-up takes an older step."""
    save, whole, pieces = tmp_path / "ckpt", tmp_path / "whole.jsonl", tmp_path / "pieces.jsonl"
    resumed = {"save": save, "load": save, "save_interval": 2, "zero_stage": 1}
    for metrics, extra in ((whole, {"zero_stage": 1}), (pieces, {**resumed, "exit_interval": 4}), (pieces, resumed)):
        done = launch_forked(flags(metrics_jsonl=metrics, **extra), ranks=2)
        assert done.returncode == 0, done.stderr
        damaged = save / "iter_0000004/mp_rank_00/model_optim_rng.pt"
        if "exit_interval" in extra:
            content = bytearray(damaged.read_bytes())
            content[len(content) // 2] ^= 1
            damaged.write_bytes(content)
    assert "its tensors are discarded" in done.stdout and "FALLING BACK" in done.stdout
    expected = [same_numbers(record) for record in read_metrics(whole)]
    assert [same_numbers(record) for record in read_metrics(pieces)][4:] == expected[2:]


# Planted bugs: state that is not restored must be found.


def forget_rng(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.training.checkpointing.set_rng_state", lambda *_: None)


def forget_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.optimizer import Optimizer

    monkeypatch.setattr(Optimizer, "load_state", lambda *_: None)


def forget_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training.checkpointing import RunCheckpoints

    restore = RunCheckpoints._restore

    def wrong(self: Any, loaded: Any, progress: Any) -> None:
        restore(self, loaded, progress)
        progress.consumed_train_samples = 0

    monkeypatch.setattr(RunCheckpoints, "_restore", wrong)


def forget_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.optimizer import Schedule

    monkeypatch.setattr(Schedule, "load_state", lambda *_: 0)


@pytest.mark.parametrize("bug", [forget_rng, forget_moments, forget_samples, forget_schedule])
def test_planted_bugs_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: Callable[[pytest.MonkeyPatch], None]
) -> None:
    whole = train_here(flags())
    save = str(tmp_path / "ckpt")
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        assert_same(run_in_pieces([3], save=save, load=save, save_interval=100), whole)
