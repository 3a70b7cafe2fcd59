"""Samples that a run sees over resumes, batch sizes, ranks and lengths: none is skipped, none comes twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.indexed.builder import IndexedDatasetBuilder
from megatron.errors import ConfigError, DataError
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import flags, make_parts, pretrain_here


def make_corpus(prefix: Path, seed: int = 7) -> str:
    random = np.random.RandomState(seed)
    builder = IndexedDatasetBuilder(str(prefix), np.uint16)
    for _ in range(70):
        builder.add_document(random.randint(0, 96, size=random.randint(1, 17)).astype(np.uint16), None)
    builder.finalize()
    return str(prefix)


@pytest.fixture
def corpus(tmp_path: Path) -> dict[str, Any]:
    """About 37 samples of 16 tokens."""
    prefix = make_corpus(tmp_path / "corpus")
    return {"mock_data": None, "data_path": prefix, "tokenizer_type": "NullTokenizer", "vocab_size": 96}


def tokens_seen(rank: int, size: int, argv: list[str]) -> list[bytes]:
    """Trains, and returns the text of each sample of this rank in order."""
    _, parts = make_parts(argv, rank=rank, world_size=size)
    seen: list[bytes] = []

    def recorded(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            seen.extend(row.numpy().tobytes() for row in batch["tokens"])
            yield batch

    parts.trainer.train_batches = recorded(parts.trainer.train_batches)
    with parts:
        parts.trainer.fit()
    return seen


def ledger(size: int, argv: list[str]) -> list[bytes]:
    return [text for rank in run_ranks(size, tokens_seen, size, argv) for text in rank]


SAMPLES: dict[str, Any] = {"train_iters": None, "train_samples": 96, "lr_decay_style": "constant"}


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (1, {"global_batch_size": 4}),
        (1, {"global_batch_size": 24, "micro_batch_size": 1}),
        (2, {"global_batch_size": 12}),
        (4, {"global_batch_size": 8}),
    ],
)
def test_another_batch_size_or_number_of_ranks_on_resume_reads_on(
    tmp_path: Path, corpus: dict[str, Any], ranks: int, changes: dict[str, Any]
) -> None:
    """Runs more than two epochs, so that the shuffle depends on the number of samples asked for."""
    whole = tokens_seen(0, 1, flags(**corpus, **SAMPLES))
    assert len(whole) == 96
    first = tokens_seen(0, 1, flags(**corpus, **SAMPLES, save=tmp_path, save_interval=100, exit_interval=3))
    second = ledger(ranks, flags(**{**corpus, **SAMPLES, "load": tmp_path, **changes}))
    assert first == whole[:24]
    assert sorted(second) == sorted(whole[24:])


def test_a_run_in_samples_goes_on_to_its_last_sample(tmp_path: Path) -> None:
    """The remaining iterations are counted from the present one, and the log says so."""
    make = {**SAMPLES, "global_batch_size": 8}
    tokens_seen(0, 1, flags(**make, save=tmp_path, save_interval=100, exit_interval=8))
    _, parts = make_parts(flags(**{**make, "global_batch_size": 16}, load=tmp_path))
    assert not parts.trainer.finished
    assert parts.trainer.reports.total_iterations == 8 + 2
    with parts:
        parts.trainer.fit()
    assert (parts.progress.iteration, parts.progress.consumed_train_samples) == (10, 96)


def test_a_run_in_iterations_keeps_its_order_with_a_smaller_batch(tmp_path: Path, corpus: dict[str, Any]) -> None:
    settings = {**corpus, "lr_decay_style": "constant", "train_iters": 12}
    whole = tokens_seen(0, 1, flags(**settings))
    tokens_seen(0, 1, flags(**settings, save=tmp_path, save_interval=100, exit_interval=6))
    smaller = tokens_seen(0, 1, flags(**settings, load=tmp_path, global_batch_size=4))
    assert smaller == whole[48 : 48 + 6 * 4]


def test_longer_training_says_that_the_order_may_change(
    tmp_path: Path, corpus: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**corpus, "lr_decay_style": "constant"}
    tokens_seen(0, 1, flags(**settings, save=tmp_path, save_interval=100))
    assert "shuffled anew" not in capsys.readouterr().out
    make_parts(flags(**settings, load=tmp_path, train_iters=9))
    assert "warning: this run requests 72 training samples, the previous run requested 48" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 5}, "--seed is 5 here and 1234 in the checkpoint"),
        ({"seq_length": 8}, "--seq-length is 8 here and 16 in the checkpoint"),
        ({"split": "90,5,5"}, "--split is 90,5,5 here and 969, 30, 1 in the checkpoint"),
        ({"split_rule": "main"}, "--split-rule is main here and 23.06"),
        ({"dataloader_type": "cyclic"}, "--dataloader-type is cyclic here and single"),
    ],
)
def test_settings_that_decide_the_order_must_stay(
    tmp_path: Path, corpus: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    saved = tmp_path / "ckpt"
    tokens_seen(0, 1, flags(**corpus, save=saved, save_interval=100))
    with pytest.raises(ConfigError, match=message):
        make_parts(flags(**{**corpus, **changes}, load=saved))
    make_parts(flags(**{**corpus, **changes}, load=saved, finetune=True))
    make_parts(flags(**{**corpus, **changes}, load=saved, skip_train=True, eval_iters=0))


def test_a_split_that_is_not_used_is_not_shown_as_the_same(tmp_path: Path, corpus: dict[str, Any]) -> None:
    saved = tmp_path / "ckpt"
    tokens_seen(0, 1, flags(**corpus, split="90,5,5", save=saved, save_interval=100))
    with pytest.raises(ConfigError, match=r"--split is not used \(no --data-path to split\) here and 90,5,5 in the"):
        make_parts(flags(load=saved))


def test_the_same_split_spelled_otherwise_is_the_same(tmp_path: Path, corpus: dict[str, Any]) -> None:
    saved = tmp_path / "ckpt"
    tokens_seen(0, 1, flags(**corpus, save=saved, save_interval=100))
    make_parts(flags(**corpus, split="969,30,1", load=saved))


def test_data_whose_content_changed_is_refused(tmp_path: Path, corpus: dict[str, Any]) -> None:
    saved = tmp_path / "ckpt"
    tokens_seen(0, 1, flags(**corpus, save=saved, save_interval=100))
    other = make_corpus(tmp_path / "elsewhere" / "same") if (tmp_path / "elsewhere").mkdir() is None else ""
    make_parts(flags(**{**corpus, "data_path": other}, load=saved))  # the same content, moved
    changed = make_corpus(tmp_path / "changed", seed=8)
    with pytest.raises(DataError, match="its content or its sources' weights have changed"):
        make_parts(flags(**{**corpus, "data_path": changed}, load=saved))
    make_parts(flags(**{**corpus, "data_path": changed}, load=saved, finetune=True))


@pytest.mark.parametrize("iters", [6, 4])
def test_resuming_at_or_past_the_end_does_nothing(tmp_path: Path, iters: int) -> None:
    """Runs with data workers and a final evaluation; only the exit reason is written."""
    settings = {"lr_decay_style": "constant", "num_workers": 1, "save": tmp_path, "save_interval": 6, "eval_iters": 1}
    assert pretrain_here(flags(**settings)) == 0
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert pretrain_here(flags(**{**settings, "train_iters": iters}, load=tmp_path)) == 0
    again = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.name for path in again if again[path] != written.get(path)} <= {"exit_reason.json", ".lock"}


def test_evaluation_only_needs_no_length_of_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_here(flags(save=tmp_path, save_interval=6, eval_iters=2)) == 0
    trained = [line for line in capsys.readouterr().out.splitlines() if "lm loss value" in line]
    argv = flags(load=tmp_path, eval_iters=2, skip_train=True, train_iters=None, lr=None)
    assert pretrain_here(argv) == 0
    evaluated = [line for line in capsys.readouterr().out.splitlines() if "lm loss value" in line]
    assert evaluated[-1] == trained[-1] and " on test set" in evaluated[-1]
