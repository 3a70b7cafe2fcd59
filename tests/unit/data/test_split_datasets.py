"""Settings to datasets: the table, the sample order of a whole run, and every error."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.config.sections.data import DataConfig
from megatron.data.blended import TokenDataset, part_samples
from megatron.data.datasets import Datasets
from megatron.data.indexed.builder import IndexedDatasetBuilder
from megatron.data.indexed.files import allow_files_for_sources
from megatron.data.indexed.record import make_record, write_record
from megatron.data.split_datasets import build_train_valid_test
from megatron.errors import ConfigError, DataError
from tests.unit.data import oracle
from tests.unit.data.oracle import random_documents, write_dataset

ROOT = Path(__file__).parents[3]


def build(num_samples: tuple[int | None, ...] = (100, 20, 10), **settings: object) -> Datasets:
    run = {
        name: settings.pop(name, default)
        for name, default in (("seed", 7), ("vocab_size", 1000), ("eod_id", 0), ("tokenizer_fingerprint", None))
    }
    settings = {
        name: (value,) if isinstance(value, str) and name.endswith("data_path") else value
        for name, value in settings.items()
    }
    config = DataConfig(**({"seq_length": 8} | settings))  # type: ignore[arg-type]
    return build_train_valid_test(config, num_samples=num_samples, **run)  # type: ignore[arg-type]


def tokens_of(dataset: TokenDataset | None, count: int | None = None) -> list[list[int]]:
    assert dataset is not None
    return [dataset[i].tolist() for i in range(len(dataset) if count is None else count)]


@pytest.fixture
def texts() -> dict[str, list[list[int]]]:
    return {
        name: random_documents(seed, count, 30)
        for seed, (name, count) in enumerate({"a": 200, "b": 50, "c": 90}.items())
    }


@pytest.fixture
def prefixes(tmp_path: Path, texts: dict[str, list[list[int]]]) -> dict[str, str]:
    return {name: write_dataset(tmp_path / name, documents) for name, documents in texts.items()}


def test_one_path(prefixes: dict[str, str], texts: dict[str, list[list[int]]]) -> None:
    built = build(data_path=prefixes["a"], split="80,15,5")
    for dataset, (first, last), wanted in (
        (built.train, (0, 160), 100),
        (built.valid, (160, 190), 20),
        (built.test, (190, 200), 10),
    ):
        assert tokens_of(dataset) == oracle.gpt_samples(texts["a"], list(range(first, last)), wanted, 8, 7)


@pytest.mark.parametrize("rule", ["23.06", "main"])
def test_weights(prefixes: dict[str, str], texts: dict[str, list[list[int]]], rule: str) -> None:
    weights = {"a": 0.5, "b": 2.0, "c": 1.1}
    path = tuple(entry for name, weight in weights.items() for entry in (str(weight), prefixes[name]))
    built = build(data_path=path, split="1,0,0", split_rule=rule, num_samples=(300, 0, 0))
    parts = []
    for name, weight in weights.items():
        wanted = part_samples(300, weight / 3.6, rule)
        parts.append(oracle.gpt_samples(texts[name], list(range(len(texts[name]))), wanted, 8, 7))
    expected = [parts[d][n] for d, n in zip(*oracle.blend(list(weights.values()), 300))]
    assert tokens_of(built.train, 300) == expected


def test_bare_prefixes_take_everything_once(prefixes: dict[str, str], texts: dict[str, list[list[int]]]) -> None:
    path = (prefixes["a"], prefixes["b"])
    one_epoch = [oracle.gpt_samples(texts[name], list(range(len(texts[name]))), 0, 8, 7) for name in ("a", "b")]
    built = build(data_path=path, split="1,0,0", num_samples=(None, 0, 0))
    assert sorted(tokens_of(built.train)) == sorted(one_epoch[0] + one_epoch[1])
    short = build(data_path=path, split="1,0,0", num_samples=(50, 0, 0))
    assert len(short.train or ()) == 50
    total = len(one_epoch[0]) + len(one_epoch[1])
    with pytest.raises(DataError, match=f"--data-path: its sources have {total} train samples in one epoch"):
        build(data_path=path, split="1,0,0", num_samples=(total + 1, 0, 0))


def test_an_evaluation_of_bare_prefixes_begins_again(prefixes: dict[str, str]) -> None:
    """Only the training set must provide the samples that a run asks for, as in Megatron."""
    built = build(data_path=(prefixes["a"], prefixes["b"]), split="8,1,1", num_samples=(50, 5000, 5000))
    for name, dataset in (("valid", built.valid), ("test", built.test)):
        assert dataset is not None and 0 < len(dataset) < 5000
        assert f"{name}: its sources have {len(dataset)} samples; an evaluation then reads them again" in built.notes


def test_a_path_for_each_split(prefixes: dict[str, str], texts: dict[str, list[list[int]]]) -> None:
    built = build(
        train_data_path=prefixes["a"], valid_data_path=("1", prefixes["b"], "1", prefixes["c"]), num_samples=(50, 9, 4)
    )
    assert tokens_of(built.train) == oracle.gpt_samples(texts["a"], list(range(200)), 50, 8, 7)
    parts = [oracle.gpt_samples(texts[name], list(range(len(texts[name]))), 5, 8, 7) for name in ("b", "c")]
    assert tokens_of(built.valid, 9) == [parts[d][n] for d, n in zip(*oracle.blend([1.0, 1.0], 9))]
    assert built.test is None and "test: no data path, so no test data" in built.notes


@pytest.mark.parametrize("documents", [1, 3, 16, 500])
def test_empty_splits_are_fine_and_said(tmp_path: Path, documents: int) -> None:
    """Megatron-LM hangs on up to 500 documents with the default split."""
    prefix = write_dataset(tmp_path / "d", [[1, 2, 3, 4]] * documents)
    built = build(data_path=prefix)
    assert built.train is not None and len(built.train) >= 100
    assert built.test is None
    assert f"test: empty (it gets none of the {documents} sequences)" in built.notes
    assert (built.valid is None) == (documents <= 16)


def test_nothing_asked_is_nothing_built(prefixes: dict[str, str]) -> None:
    built = build(data_path=prefixes["a"], num_samples=(10, 0, 0))
    assert built.valid is built.test is None and "valid" not in built.table


def test_training_cannot_do_without(tmp_path: Path, prefixes: dict[str, str]) -> None:
    with pytest.raises(DataError, match=r"the training split is empty .*another --split"):
        build(data_path=prefixes["a"], split="0,1,0")
    with IndexedDatasetBuilder(tmp_path / "none", "uint16"):
        pass
    with pytest.raises(DataError, match="the training split is empty"):
        build(data_path=str(tmp_path / "none"))
    with pytest.raises(DataError, match="the training split is empty"):
        build(data_path=write_dataset(tmp_path / "empty", [[], []]))
    with pytest.raises(ConfigError, match="--train-data-path: not given"):
        build(valid_data_path=prefixes["a"])


def test_source_without_a_split_shares_its_weight(tmp_path: Path, prefixes: dict[str, str]) -> None:
    tiny = write_dataset(tmp_path / "tiny", [[1, 2, 3]])
    built = build(data_path=("1", prefixes["a"], "1", tiny), split="8,1,1")
    assert any(note.startswith(f"valid: {tiny} has no valid data") for note in built.notes)
    assert built.valid is not None and len(built.valid) >= 20


def test_one_epoch_of_a_split_too_small_for_a_sample(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", [[1, 2, 3]] * 10)
    built = build(data_path=prefix, split="8,1,1", num_samples=(5, None, None))
    assert built.valid is None and any(
        "valid: empty (3 tokens, and one sample takes 9)" in note for note in built.notes
    )


def test_table(prefixes: dict[str, str], texts: dict[str, list[list[int]]]) -> None:
    built = build(data_path=("1", prefixes["a"], "3", prefixes["b"]), split="1,0,0", num_samples=(400, 0, 0))
    header, first, second = built.table.splitlines()
    assert header.split() == ["split", "source", "weight", "sequences", "tokens", "samples", "epochs"]
    tokens = sum(len(text) for text in texts["b"])
    assert first.split()[:4] == ["train", prefixes["a"], "0.25", "200"] and first.split()[5] == "100"
    assert second.split() == ["train", prefixes["b"], "0.75", "50", f"{tokens:,}", "300", f"{300 * 8 / tokens:.2f}"]
    assert re.search(r"indices ready in \d+\.\d\d s \(built by", built.notes[-1])


def test_sentences_are_sampled_one_by_one_and_it_is_said(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "d_sentence", "uint16") as builder:
        for start in range(0, 60, 6):
            builder.add_document(list(range(start, start + 6)), [4, 2])
    sentences = [
        list(range(start, start + length))
        for begin in range(0, 60, 6)
        for start, length in ((begin, 4), (begin + 4, 2))
    ]
    built = build(data_path=str(tmp_path / "d_sentence"), split="1,0,0", num_samples=(9, 0, 0))
    assert tokens_of(built.train) == oracle.gpt_samples(sentences, list(range(20)), 9, 8, 7)
    assert [note for note in built.notes if "sequences are shuffled" in note] == [
        f"{tmp_path / 'd_sentence'}: 10 documents with 20 sequences in total: sequences are shuffled, not documents"
    ]


def test_record_is_checked_before_anything_is_built(prefixes: dict[str, str]) -> None:
    prefix = prefixes["a"]
    assert any("no record of the tokenizer" in note for note in build(data_path=prefix).notes)
    record = make_record(prefix, tokenizer_fingerprint="abc", vocab_size=1000, eod_id=0, max_id=999)
    write_record(prefix, record)
    assert not any("no record" in note for note in build(data_path=prefix, tokenizer_fingerprint="abc").notes)
    with pytest.raises(DataError, match="made with another tokenizer"):
        build(data_path=prefix, tokenizer_fingerprint="xyz")
    with pytest.raises(DataError, match="max_id 999 is not below"):
        build(data_path=prefix, vocab_size=999)


def test_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    def fingerprint(name: str, documents: list[list[int]], record: bool = False) -> str:
        prefix = write_dataset(tmp_path / name, documents)
        if record:
            write_record(prefix, make_record(prefix, tokenizer_fingerprint="t", vocab_size=9, eod_id=0, max_id=5))
        return build(data_path=prefix, num_samples=(5, 0, 0)).fingerprint

    first = fingerprint("a", [[1, 2, 3], [4, 5]])
    assert fingerprint("moved", [[1, 2, 3], [4, 5]]) == first
    others = {fingerprint("b", [[1, 2], [3, 4, 5]]), fingerprint("c", [[1, 2, 3], [4, 5]], record=True)}
    assert len(others | {first}) == 3


def test_pread_gives_the_same(prefixes: dict[str, str]) -> None:
    assert tokens_of(build(data_path=prefixes["a"]).train) == tokens_of(
        build(data_path=prefixes["a"], mmap_bin_files=False).train
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "--data-path: not given"),
        ({"data_path": "a", "valid_data_path": "b"}, "--data-path and --train/valid/test-data-path exclude each other"),
        ({"data_path": "a", "mock_data": True}, "--mock-data and a data path exclude each other"),
        ({"mock_data": True, "vocab_size": None}, "--mock-data: the vocabulary size is None"),
        ({"train_data_path": "a", "split": "x"}, "--split x"),
        ({"data_path": "missing/prefix"}, "missing/prefix.idx does not exist"),
        ({"data_path": ("0", "a")}, "--data-path 0 a: the weight 0 of a"),
    ],
)
def test_refusals(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(**settings)  # type: ignore[arg-type]


def test_weights_need_a_number_of_samples(prefixes: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="--data-path: has weights, but the run uses the whole valid split"):
        build(data_path=("1", prefixes["a"], "1", prefixes["b"]), num_samples=(10, None, 0))


def test_cache_path_that_was_asked_for(tmp_path: Path, prefixes: dict[str, str]) -> None:
    build(data_path=prefixes["a"], data_cache_path=str(tmp_path / "elsewhere"))
    assert list((tmp_path / "elsewhere").glob("*-description.json")) and not (tmp_path / "index-cache").exists()


def test_mock_data() -> None:
    built = build(mock_data=True, vocab_size=11, eod_id=3)
    again = build(mock_data=True, vocab_size=11, eod_id=3)
    assert tokens_of(built.train) == tokens_of(again.train) and len(built.train or ()) == 100
    samples = np.array(tokens_of(built.train))
    assert samples.min() >= 0 and samples.max() < 11 and (samples == 3).any(axis=1).all()
    assert tokens_of(built.train, 10) != tokens_of(built.valid, 10)
    assert tokens_of(built.train) != tokens_of(build(mock_data=True, vocab_size=11, eod_id=3, seed=8).train)


def test_no_torch() -> None:
    """Everything but the loader starts without torch: preprocessing and planning are quick."""
    code = (
        "import sys, importlib, pkgutil, megatron.data\n"
        "for m in pkgutil.iter_modules(megatron.data.__path__):\n"
        "    if m.name not in ('loader', '_helpers'): importlib.import_module('megatron.data.' + m.name)\n"
        "assert 'torch' not in sys.modules, 'torch'"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_many_sources_under_a_small_limit_of_open_files(tmp_path: Path) -> None:
    path = []
    for number in range(150):
        path += ["1", write_dataset(tmp_path / f"d{number}", [[number] * 40] * 3)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        built = build(data_path=tuple(path), split="1,0,0", num_samples=(3000, 0, 0))
        assert len(set(np.concatenate(tokens_of(built.train, 3000)).tolist())) == 150
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_sources_than_files_may_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1024))
    with pytest.raises(ConfigError, match=r"500 data sources need 1256 open files, .* 1024; raise the limit"):
        allow_files_for_sources(500, 1000)


@pytest.mark.parametrize("rule", ["23.06", "main"])
def test_length_of_a_blend_is_that_of_megatron(prefixes: dict[str, str], rule: str) -> None:
    path = ("1", prefixes["a"], "1", prefixes["b"], "1", prefixes["c"])
    built = build(data_path=path, split="1,0,0", split_rule=rule, num_samples=(400, 0, 0))
    assert len(built.train or ()) == {"23.06": 3 * 134, "main": 3 * 134}[rule]  # ceil(133.33 x 1.005), ceil(133.33)
    built = build(data_path=path, split="1,0,0", split_rule=rule, num_samples=(900, 0, 0))
    assert len(built.train or ()) == {"23.06": 3 * 302, "main": 3 * 300}[rule]
