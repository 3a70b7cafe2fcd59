"""Thousands of sources, their records, and the boundaries of their documents."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from megatron.config import DataConfig
from megatron.data.datasets import Datasets
from megatron.data.index_builders import Builders
from megatron.data.indexed.builder import IndexedDatasetBuilder
from megatron.data.indexed.record import make_record, write_record
from megatron.data.split_datasets import build_train_valid_test
from megatron.errors import ConfigError, DataError
from tests.unit.data.oracle import write_dataset

EOD = 0


def build(words: list[str], samples: int = 50, **settings: object) -> Datasets:
    config = DataConfig(seq_length=8, data_path=tuple(words), split="1,0,0", **settings)  # type: ignore[arg-type]
    return build_train_valid_test(config, num_samples=(samples, 0, 0), seed=1, vocab_size=100, eod_id=EOD)


def test_thousands_of_sources(tmp_path: Path) -> None:
    """Sources occur by weight, with few cache files and log lines; samples equal those of a source built alone."""
    count, words = 1200, []
    for number in range(count):
        prefix = write_dataset(tmp_path / f"s{number}", [[number % 97 + 1] * 7] * 5)
        words += [str(1 + number % 3), prefix]
    (tmp_path / "mixture").write_text(" ".join(words))
    samples = 12000
    config = DataConfig(seq_length=8, data_args_path=str(tmp_path / "mixture"), split="1,0,0")
    built = build_train_valid_test(config, num_samples=(samples, 0, 0), seed=1, vocab_size=100, eod_id=EOD)
    assert built.train is not None and len(built.table.splitlines()) < 12 and len(built.notes) < 5
    assert len(built.full_table.splitlines()) == 1 + count
    assert any(note.startswith(f"{words[1]} and {count - 1} other sources: no record") for note in built.notes)
    assert any(note.startswith(f"{count} sources opened and checked in ") for note in built.notes)
    tokens = np.array([built.train[i][0] for i in range(samples)])
    weights = np.zeros(98)
    for number in range(count):
        weights[number % 97 + 1] += (1 + number % 3) / (2 * count)
    assert (abs(np.bincount(tokens, minlength=98) - samples * weights) <= 13).all()  # 13 sources share a token, 1 each
    written = [path for path in tmp_path.rglob("*") if path.suffix in (".npy", ".json")]
    assert len(written) <= 3, "an index of a few documents is not worth files of its own"


def test_a_small_index_is_kept_where_it_was_asked_for(tmp_path: Path) -> None:
    prefix, cache = write_dataset(tmp_path / "s", [[1, 2, 3]] * 50), tmp_path / "cache"
    first = build([prefix], data_cache_path=str(cache))
    assert len(list(cache.iterdir())) == 4
    again = build([prefix], data_cache_path=str(cache))
    plain = build([prefix])
    assert first.train is not None and again.train is not None and plain.train is not None
    for index in range(50):
        assert first.train[index].tolist() == again.train[index].tolist() == plain.train[index].tolist()


def test_a_source_in_two_splits_is_opened_once(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "s", [[1, 2, 3]] * 50)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    config = DataConfig(seq_length=8, train_data_path=("0.5", prefix, "0.5", prefix), valid_data_path=(prefix,))
    built = build_train_valid_test(config, num_samples=(40, 5, 0), seed=1, vocab_size=100, eod_id=EOD)
    assert built.train is not None and built.valid is not None
    assert len(os.listdir("/proc/self/fd")) <= before + 1


# Borders of documents


def with_ends(prefix: Path, last: int, sentences: bool = False) -> str:
    with IndexedDatasetBuilder(prefix, "uint16") as builder:
        for _ in range(30):
            builder.add_document([5, 6, 7, 8, last], [2, 3] if sentences else None)
    return str(prefix)


@pytest.mark.parametrize("sentences", [False, True])
def test_marked_borders(tmp_path: Path, sentences: bool) -> None:
    build([with_ends(tmp_path / "s", EOD, sentences)], reset_attention_mask=True)
    with pytest.raises(ConfigError, match=r"--reset-attention-mask: the documents of .*t do not end with .* 0, so"):
        build([with_ends(tmp_path / "t", 9, sentences)], reset_attention_mask=True)


def test_only_the_first_documents_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty documents are skipped, however many there are."""
    with IndexedDatasetBuilder(tmp_path / "s", "uint16") as builder:
        for _ in range(50):
            builder.add_document([], [])
            builder.add_document([])
        builder.add_document([5, EOD])
        for _ in range(5000):
            builder.add_document([5, 6])
    monkeypatch.setattr("megatron.data.sources._BLOCK", 7)
    build([str(tmp_path / "s")], reset_attention_mask=True)
    monkeypatch.setattr("megatron.data.sources._LOOKED_AT", 1)
    build([str(tmp_path / "s")], reset_attention_mask=True)


def test_a_record_says_whether_ends_were_added(tmp_path: Path) -> None:
    """Without --append-eod an end of document in the text is accidental."""
    prefix = with_ends(tmp_path / "s", EOD)
    for appended in (True, False):
        extra = {"append_eod": appended}
        write_record(
            prefix, make_record(prefix, tokenizer_fingerprint="t", vocab_size=100, eod_id=EOD, max_id=8, extra=extra)
        )
        if appended:
            build([prefix], eod_mask_loss=True)
        else:
            with pytest.raises(ConfigError, match=r"--eod-mask-loss: .*--append-eod, or remove --eod-mask-loss"):
                build([prefix], eod_mask_loss=True)
        build([prefix])


# What a mixture is, for a checkpoint


def test_the_fingerprint_is_of_the_weights_too(tmp_path: Path) -> None:
    one, two = write_dataset(tmp_path / "a", [[1, 2, 3]] * 50), write_dataset(tmp_path / "b", [[4, 5]] * 50)
    assert build(["1", one, "2", two]).fingerprint == build(["1.0", one, "2.0", two]).fingerprint
    prints = [
        build(words, samples=20).fingerprint
        for words in (["1", one, "2", two], ["2", one, "1", two], ["1", two, "2", one], [one, two], [one], ["1", one])
    ]
    assert len(set(prints)) == 6  # one source with a weight is built for more samples, so maybe for more epochs


def test_the_fingerprint_is_of_the_split_of_a_source_too(tmp_path: Path) -> None:
    """The same files in the same order, but assigned to other splits."""
    one, two, three = (write_dataset(tmp_path / name, [[number, 2, 3]] * 50) for number, name in enumerate("abc"))
    prints = []
    for train, valid in (((one, two), (three,)), ((one,), (two, three)), ((one, two, three), None)):
        config = DataConfig(seq_length=8, train_data_path=train, valid_data_path=valid)
        built = build_train_valid_test(config, num_samples=(10, 5, 0), seed=1, vocab_size=100, eod_id=EOD)
        prints.append(built.fingerprint)
    assert len(set(prints)) == 3


# Progress lines and sweeps


def test_long_work_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.data.source_datasets._SAID_EVERY", 0.0)
    words = [word for name in "ab" for word in ("1", write_dataset(tmp_path / name, [[1, 2, 3]] * 50))]
    said: list[str] = []
    config = DataConfig(seq_length=8, data_path=tuple(words), split="1,0,0")
    builders = Builders.resolve(say=said.append)
    build_train_valid_test(config, num_samples=(10, 0, 0), seed=1, vocab_size=100, eod_id=EOD, builders=builders)
    assert "data: 1 of 2 sources opened and checked ..." in said
    assert "data: train: indices of 1 of 2 sources ready ..." in said


def test_what_killed_builders_left_is_removed(tmp_path: Path) -> None:
    prefix, cache = write_dataset(tmp_path / "s", [[1, 2, 3]] * 50), tmp_path / "cache"
    build([prefix], data_cache_path=str(cache))
    entry = next(cache.glob("*-order.npy")).name
    old, young, foreign = f".{entry}.123-0a1b2c3d.tmp", f".{entry}.124-0a1b2c3e.tmp", ".notes.tmp"
    for name in (old, young, foreign):
        (cache / name).write_bytes(b"half")
    for name in (old, foreign):
        os.utime(cache / name, (0, 0))
    build([prefix], data_cache_path=str(cache))
    assert {path.name for path in cache.glob(".*")} == {young, foreign}


# Data that is hardly there


@pytest.mark.parametrize("documents", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_the_smallest_data_trains(tmp_path: Path, documents: int, length: int) -> None:
    """One document, three documents with the default split, documents of one token."""
    prefix = write_dataset(tmp_path / "s", [[7] * length] * documents)
    config = DataConfig(seq_length=8, data_path=(prefix,))
    built = build_train_valid_test(config, num_samples=(20, 4, 4), seed=1, vocab_size=100, eod_id=EOD)
    assert built.train is not None and len(built.train) >= 20
    assert built.train[19].tolist() == [7] * 9
    assert built.valid is None and built.test is None
    for name in ("valid", "test"):
        assert f"{name}: empty (it gets none of the {documents} sequences)" in built.notes
    assert built.warnings or documents * length * 4 >= 160


def test_one_token_in_one_document_for_one_sample(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "s", [[], [3], []])
    built = build([prefix], samples=1)
    assert built.train is not None and built.train[0].tolist() == [3] * 9


def test_nothing_at_all(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the training split is empty \(it gets none of the 1 sequences\)"):
        build([write_dataset(tmp_path / "s", [[]])])
    with pytest.raises(ConfigError, match=r"nowhere\.idx does not exist"):
        build([str(tmp_path / "nowhere")])


def test_a_url_is_refused_with_the_command_that_fetches_it(tmp_path: Path) -> None:
    local = write_dataset(tmp_path / "a", [[1, 2, 3]])
    with pytest.raises(ConfigError, match=r"s3://b/web: .*merge_datasets.py --input s3://b/web --output-prefix web\)"):
        build(["1", local, "1", "s3://b/web"])
