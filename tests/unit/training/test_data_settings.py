"""Settings of the data: early rejections, log lines, and their effect on batches."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.data.indexed.builder import IndexedDatasetBuilder
from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.training import assemble
from tests.helpers.runs import flags, make_parts, pretrain_here, train_here
from tests.unit.training.test_data_order import make_corpus, tokens_seen

NULL: dict[str, Any] = {"mock_data": None, "tokenizer_type": "NullTokenizer", "vocab_size": 96}


@pytest.fixture
def corpus(tmp_path: Path) -> dict[str, Any]:
    return {**NULL, "data_path": make_corpus(tmp_path / "corpus")}


def with_ends(prefix: Path, end: int = 96) -> str:
    """Documents of 7 tokens, ending with the end of document."""
    random = np.random.RandomState(3)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(60):
            builder.add_document([*random.randint(0, 96, size=6), end])
    return str(prefix)


# resuming on other data


def test_changed_data_may_be_accepted_and_it_is_said(
    tmp_path: Path, corpus: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "ckpt"
    tokens_seen(0, 1, flags(**corpus, save=saved, save_interval=3, exit_interval=3))
    changed = {**corpus, "data_path": make_corpus(tmp_path / "changed", seed=8)}
    with pytest.raises(DataError, match=r"its content or its sources' weights have changed.* --accept-changed-data"):
        make_parts(flags(**changed, load=saved))
    capsys.readouterr()
    _, parts = make_parts(flags(**changed, load=saved, accept_changed_data=True))
    assert "warning: --accept-changed-data: the data differs from" in capsys.readouterr().out
    assert (parts.progress.iteration, parts.progress.consumed_train_samples) == (3, 24)  # all else goes on
    with parts:
        parts.trainer.fit()
    with pytest.raises(ConfigError, match=r"--split-rule is main here .* --accept-changed-data"):
        make_parts(flags(**corpus, load=saved, split_rule="main"))
    make_parts(flags(**corpus, load=saved, split_rule="main", accept_changed_data=True))
    assert "warning: --accept-changed-data: the order of the samples differs" in capsys.readouterr().out


def test_unchanged_data_has_nothing_to_accept(
    tmp_path: Path, corpus: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "ckpt"
    tokens_seen(0, 1, flags(**corpus, save=saved, save_interval=3, exit_interval=3))
    capsys.readouterr()
    make_parts(flags(**corpus, load=saved, accept_changed_data=True))
    assert "warning" not in capsys.readouterr().out


def test_one_changed_byte_of_the_index_or_the_record(tmp_path: Path, corpus: dict[str, Any]) -> None:
    """Swaps two documents of the .idx, and adds a record where none was."""
    from megatron.data.indexed.record import make_record, write_record

    saved, prefix = tmp_path / "ckpt", corpus["data_path"]
    tokens_seen(0, 1, flags(**corpus, save=saved, save_interval=3, exit_interval=3))
    record = make_record(prefix, tokenizer_fingerprint="x" * 64, vocab_size=97, eod_id=96, max_id=95)
    path = write_record(prefix, record)
    with pytest.raises((DataError, ConfigError)):
        make_parts(flags(**corpus, load=saved))
    path.unlink()
    make_parts(flags(**corpus, load=saved))
    data = Path(f"{prefix}.bin")
    data.write_bytes(data.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"corpus\.bin"):
        make_parts(flags(**corpus, load=saved, accept_changed_data=True))  # damage is nothing to accept


def test_changed_weights_are_changed_data(tmp_path: Path) -> None:
    one, two, saved = make_corpus(tmp_path / "a"), make_corpus(tmp_path / "b", seed=9), tmp_path / "ckpt"
    mixture: dict[str, Any] = {**NULL, "data_path": ["0.7", one, "0.3", two]}
    tokens_seen(0, 1, flags(**mixture, save=saved, save_interval=3, exit_interval=3))
    with pytest.raises(DataError, match="or its sources' weights have changed"):
        make_parts(flags(**{**mixture, "data_path": ["0.3", one, "0.7", two]}, load=saved))
    file = tmp_path / "mixture"
    file.write_text(f"0.7 {one}\n0.3 {two}\n")
    make_parts(flags(**NULL, data_args_path=file, load=saved))  # the same in a file


# refused before data and model


def refuse_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_late(*_: object, **__: object) -> None:
        raise AssertionError("data or model are being built")

    monkeypatch.setattr(assemble, "build_data", too_late)
    monkeypatch.setattr(assemble, "build_model", too_late)


def test_another_architecture_is_refused_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_here(flags(save=tmp_path, save_interval=6))
    refuse_work(monkeypatch)
    with pytest.raises(CheckpointError, match=r"--num-layers: checkpoint 2, this run 3; --swiglu|--hidden-size.*"):
        make_parts(flags(load=tmp_path, num_layers=3, hidden_size=64))
    with pytest.raises(AssertionError, match="being built"):
        make_parts(flags(load=tmp_path))


def test_wandb_is_refused_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    refuse_work(monkeypatch)
    assert pretrain_here(flags(wandb_project="p")) == 2
    error = capsys.readouterr().err
    assert "--wandb-project p" in error and "pip install wandb" in error and "Traceback" not in error


# epochs and the table


def test_the_limit_of_epochs(tmp_path: Path, corpus: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """48 samples of 16 tokens are more than one epoch of about 37."""
    with pytest.raises(ConfigError, match=r"--max-epochs 1: training would read .*corpus 1\.\d\d times"):
        make_parts(flags(**corpus, max_epochs=1))
    make_parts(flags(**corpus, max_epochs=2))
    assert "warning" not in capsys.readouterr().out
    make_parts(flags(**corpus, train_iters=30, lr_decay_style="constant"))
    assert "warning: training reads" in capsys.readouterr().out


def test_the_whole_table_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for n in range(25) for word in ("1", make_corpus(tmp_path / f"d{n}", seed=n))]
    file = tmp_path / "table.txt"
    make_parts(flags(**NULL, data_path=words, data_table_path=file))
    assert sum(str(tmp_path / "d") in line for line in file.read_text().splitlines()) == 25
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("train ")]
    assert len(shown) < 10 and "all 25 sources" in shown[-1]


# inside a sample


def test_masking_asked_for_in_either_spelling(tmp_path: Path) -> None:
    data = {**NULL, "data_path": with_ends(tmp_path / "ends")}
    batches = {}
    for flag in ("reset_attention_mask", "dataloader_inter_document_masking"):
        _, parts = make_parts(flags(**data, **{flag: True}))
        batches[flag] = next(iter(parts.trainer.train_batches))
    one, other = batches.values()
    assert torch.equal(one["document_ids"].keys, other["document_ids"].keys) and one["document_ids"].divide_rows
    _, parts = make_parts(flags(**data))
    assert "document_ids" not in next(iter(parts.trainer.train_batches))


BORDERS = ["reset_attention_mask", "dataloader_inter_document_masking", "reset_position_ids", "eod_mask_loss"]


@pytest.mark.parametrize("flag", BORDERS)
def test_borders_that_nothing_marks_are_refused(
    flag: str, corpus: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "build_model", None)
    spelling = "--" + flag.replace("_", "-")
    with pytest.raises(ConfigError, match=f"{spelling}: the tokenizer has no end-of-document id"):
        make_parts(flags(**{flag: True}))  # mock data and no tokenizer
    with pytest.raises(ConfigError, match=f"{spelling}: the documents of .*corpus do not end with .*--append-eod"):
        make_parts(flags(**corpus, **{flag: True}))


def test_one_permutation_for_all_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--no-data-sharding: a step's samples do not depend on the number of ranks; with sharding they do."""
    from megatron.data.sampler import BlockShape, cyclic_batches

    def steps(ranks: int, sharding: bool) -> list[list[int]]:
        shapes = [BlockShape(micro_batch_size=2, dp_rank=rank, dp_size=ranks) for rank in range(ranks)]
        streams = [cyclic_batches(64, 0, shape, data_sharding=sharding) for shape in shapes]
        return [sorted(i for stream in streams for _ in range(4 // ranks) for i in next(stream)) for _ in range(20)]

    assert steps(1, False) == steps(2, False) == steps(4, False)
    assert steps(1, True) != steps(2, True)

    orders = {}
    for name, settings in {"sharded": {}, "one": {"no_data_sharding": True}}.items():
        _, parts = make_parts(flags(dataloader_type="cyclic", **settings))
        orders[name] = [next(parts.trainer.train_batches)["sample_ids"].tolist() for _ in range(3)]
    assert orders["one"] == [
        next(cyclic)
        for cyclic in [cyclic_batches(48, 0, BlockShape(micro_batch_size=2, dp_rank=0, dp_size=1), data_sharding=False)]
        for _ in range(3)
    ]
    make_parts(flags(no_data_sharding=True, save=tmp_path, save_interval=6))


def test_sharding_is_part_of_the_order(tmp_path: Path) -> None:
    train_here(flags(dataloader_type="cyclic", save=tmp_path, save_interval=3, exit_interval=3))
    with pytest.raises(ConfigError, match="--data-sharding is False here and True in the checkpoint"):
        make_parts(flags(dataloader_type="cyclic", load=tmp_path, no_data_sharding=True))


# fill in the middle


@pytest.fixture
def text_corpus(tmp_path: Path) -> dict[str, Any]:
    """Documents of a small byte-level BPE with the tokens of fill in the middle."""
    from megatron.tokenizer.gpt2 import GPT2BPETokenizer
    from tests.unit.tokenizer.support import SAMPLES, write_small_bpe

    vocab_file, merge_file = write_small_bpe(tmp_path)
    vocab = json.loads(vocab_file.read_text())
    for name in ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"):
        vocab[name] = len(vocab)
    vocab_file.write_text(json.dumps(vocab))
    tokenizer = GPT2BPETokenizer(vocab_file, merge_file)
    with IndexedDatasetBuilder(tmp_path / "text", np.uint16) as builder:
        for text in SAMPLES * 6:
            builder.add_document([*tokenizer.tokenize(text), tokenizer.eod])
    files = {"vocab_file": vocab_file, "merge_file": merge_file, "data_path": tmp_path / "text"}
    return {"mock_data": None, "vocab_size": None, **files}


def test_fill_in_the_middle_in_a_run_and_its_resume(tmp_path: Path, text_corpus: dict[str, Any]) -> None:
    make = {**text_corpus, "lr_decay_style": "constant"}
    plain, whole = (tokens_seen(0, 1, flags(**make, **fim)) for fim in ({}, {"fim_data": True}))
    changed = sum(one != other for one, other in zip(plain, whole, strict=True))
    assert len(whole) == 48 and changed > 10
    saved = tmp_path / "ckpt"
    first = tokens_seen(0, 1, flags(**make, fim_data=True, save=saved, save_interval=2, exit_interval=2))
    rest = tokens_seen(0, 1, flags(**make, fim_data=True, load=saved, num_workers=1, micro_batch_size=4))
    assert first + rest == whole
    with pytest.raises(ConfigError, match=r"--fim-rate is 0\.9 here and 0\.5 in the checkpoint"):
        make_parts(flags(**make, fim_data=True, fim_rate=0.9, load=saved))


def test_fill_in_the_middle_without_its_tokens(text_corpus: dict[str, Any], corpus: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--fim-prefix-token <PRE>: the tokenizer's vocabulary"):
        make_parts(flags(**text_corpus, fim_data=True, fim_prefix_token="<PRE>"))
    with pytest.raises(ConfigError, match="--fim-data: needs a text tokenizer"):
        make_parts(flags(**corpus, fim_data=True))
    with pytest.raises(ConfigError, match="--fim-split-sample TOKEN and --fim-fragment-rate RATE need each other"):
        make_parts(flags(**text_corpus, fim_data=True, fim_split_sample="<file>"))


@pytest.mark.parametrize(
    ("split", "sets"), [("99,1,0", "valid"), ("9,0,1", "test"), ("1,0,0", ""), (None, "valid test")]
)
def test_mock_data_has_the_sets_that_the_split_gives_a_share(
    capsys: pytest.CaptureFixture[str], split: str | None, sets: str
) -> None:
    assert pretrain_here(flags(split=split, eval_iters=1, train_iters=1, cpu_threads=1)) == 0
    said = capsys.readouterr().out
    evaluated = [name for name in ("validation", "test") if f" on {name} set" in said]
    assert [name[:5] for name in evaluated] == sets.split()
    assert ("--split" in said) is False
    assert pretrain_here(flags(split=split, eval_iters=1, train_iters=1, cpu_threads=1, dry_run=True)) == 0
    (planned,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  samples ")]
    assert [bool(int(n)) for n in re.findall(r"(\d+) (?:validation|test)", planned)] == [
        name in evaluated for name in ("validation", "test")
    ]
