"""A run continues with the tokenizer that it began with, even if its data has no record of one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.cli.inspect_dataset import main as inspect_dataset
from megatron.cli.merge_datasets import main as merge_datasets
from megatron.data.indexed.builder import IndexedDatasetBuilder
from megatron.data.indexed.dataset import IndexedDataset
from megatron.data.indexed.record import FIRST_TOKENS, difference_of, first_tokens, make_record, write_record
from megatron.errors import DataError
from megatron.evaluation.texts import _indexed
from megatron.tokenizer.export import bpe_file_texts, write_files
from megatron.tokenizer.gpt2 import GPT2BPETokenizer
from megatron.tokenizer.train import train_bpe
from megatron.utils.token_difference import token_difference
from tests.helpers.runs import flags, pretrain_here
from tests.unit.tokenizer.support import SAMPLES


def two_tokenizers(folder: Path) -> tuple[GPT2BPETokenizer, GPT2BPETokenizer]:
    for name, texts in (("one", SAMPLES), ("other", ("another text", *SAMPLES[2:]))):
        write_files(folder / name, bpe_file_texts(train_bpe(list(texts), 270)))
    one, other = (GPT2BPETokenizer(folder / n / "vocab.json", folder / n / "merges.txt") for n in ("one", "other"))
    return one, other


def first_that_differs(folder: Path, numbers: list[int]) -> str:
    """Read from the two vocab.json: the first of these ids whose token has another id in the other file, if any."""
    one, other = (json.loads((folder / name / "vocab.json").read_text()) for name in ("one", "other"))
    token = {number: token for token, number in one.items()}
    number = next(number for number in numbers if token[number].isascii() and other.get(token[number]) != number)
    return f"token {token[number]!r} has id {number} in "


def test_another_tokenizer_of_the_same_size_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, _ = two_tokenizers(tmp_path)
    one.save_pretrained(tmp_path / "saved")  # the same tokenizer in another form
    with IndexedDatasetBuilder(tmp_path / "data", "uint16") as builder:
        for _ in range(20):
            builder.add_document(np.arange(100), [100])

    def run(iterations: int, **tokenizer: Any) -> int:
        words = {"mock_data": None, "vocab_size": None, "data_path": tmp_path / "data", "split": "100,0,0"}
        words |= {
            "save": tmp_path / "run",
            "load": tmp_path / "run",
            "train_iters": iterations,
            "eval_iters": 0,
            "lr_decay_iters": 2,
        }
        return pretrain_here(flags(**words, **tokenizer))

    def gpt2(name: str) -> dict[str, Path]:
        return {"vocab_file": tmp_path / name / "vocab.json", "merge_file": tmp_path / name / "merges.txt"}

    assert run(1, **gpt2("one")) == 0
    capsys.readouterr()
    assert run(2, **gpt2("other")) == 11
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert (
        "the tokenizer (GPT2BPETokenizer, fingerprint " in line and f"not the tokenizer of {tmp_path / 'run'}" in line
    )
    assert first_that_differs(tmp_path, list(range(270))) + "the checkpoint and id" in line
    assert run(2, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=tmp_path / "saved") == 0


def test_data_of_another_tokenizer_names_the_first_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Training, evaluation, an inspection and a merge end with exit code 11."""
    one, other = two_tokenizers(tmp_path)
    ids = one.tokenize("".join(SAMPLES))
    for name, tokenizer in (("data", one), ("second", other)):
        with IndexedDatasetBuilder(tmp_path / name, "uint16") as builder:
            for _ in range(20):
                builder.add_document(np.array(ids), [len(ids)])
        sample = first_tokens(IndexedDataset(tmp_path / name), tokenizer)
        about: dict[str, Any] = {"vocab_size": 270, "eod_id": tokenizer.eod_id, "max_id": max(ids)}
        extra = {FIRST_TOKENS: sample}
        write_record(
            tmp_path / name,
            make_record(tmp_path / name, tokenizer_fingerprint=tokenizer.fingerprint, extra=extra, **about),
        )
    files = {"vocab_file": tmp_path / "other" / "vocab.json", "merge_file": tmp_path / "other" / "merges.txt"}
    named = first_that_differs(tmp_path, ids) + "the data and id"
    words = {"mock_data": None, "vocab_size": None, "data_path": tmp_path / "data", "split": "100,0,0", "eval_iters": 0}
    for way in ({}, {"dry_run": True}):
        assert pretrain_here(flags(**words, **files, **way)) == 11
        assert named in capsys.readouterr().err
    given = [word for name, path in files.items() for word in (f"--{name.replace('_', '-')}", str(path))]
    assert inspect_dataset([str(tmp_path / "data"), *given]) == 11
    assert named in capsys.readouterr().err
    with pytest.raises(DataError, match="made with another tokenizer") as raised:
        list(_indexed(str(tmp_path / "data"), other))
    assert named in str(raised.value)
    assert merge_datasets(["--input", str(tmp_path), "--output-prefix", str(tmp_path / "merged")]) == 11


def test_records_of_others_name_no_token(tmp_path: Path) -> None:
    """A record without tokens, or with values of other types, changes nothing but the message."""
    _, other = two_tokenizers(tmp_path)
    with IndexedDatasetBuilder(tmp_path / "data", "uint16") as builder:
        builder.add_document(np.arange(3), [3])
    strange = (None, 7, [1], [[1]], [[True, "a"]], [["a", 1]], [[-1, "a"]], [[1, None]], {"a": 1})
    for value in strange:
        made = make_record(
            tmp_path / "data", tokenizer_fingerprint="x", vocab_size=9, eod_id=8, max_id=2, extra={FIRST_TOKENS: value}
        )
        assert difference_of(made, other) == ""


class Fussy:
    """A tokenizer whose library rejects most texts and some ids, as NullTokenizer and TikToken do."""

    vocab_size = 4

    def tokenize(self, text: str) -> list[int]:
        if not text.isdigit():
            raise DataError("not a number")
        return [int(text)]

    def detokenize(self, ids: Iterable[int]) -> str:
        (number,) = ids
        if number == 3:
            raise DataError("no such id")
        return str(number)


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        ([(0, "0"), (1, "hello")], "; token 'hello' has id 1 in the data and no id in the run's tokenizer"),
        ([(0, "0"), (3, "2")], "; token '2' has id 3 in the data and id 2 in the run's tokenizer"),
        ([(9, "1")], "; token '1' has id 9 in the data and id 1 in the run's tokenizer"),
        ([(1, ""), (0, "a\ufffd"), (2, "1")], "; token '1' has id 2 in the data and id 1 in the run's tokenizer"),
        ([(0, "0"), (1, "1")], ""),
    ],
)
def test_texts_and_ids_that_a_tokenizer_rejects_have_no_id(theirs: list[tuple[int, str]], named: str) -> None:
    assert token_difference(theirs, "the data", Fussy()) == named


def test_a_tokenizer_of_numbers_reads_no_text_of_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, _ = two_tokenizers(tmp_path)
    ids = one.tokenize("".join(SAMPLES))
    with IndexedDatasetBuilder(tmp_path / "data", "uint16") as builder:
        builder.add_document(np.array(ids), [len(ids)])
    extra = {FIRST_TOKENS: first_tokens(IndexedDataset(tmp_path / "data"), one)}
    about: dict[str, Any] = {"vocab_size": 270, "eod_id": one.eod_id, "max_id": max(ids), "extra": extra}
    write_record(tmp_path / "data", make_record(tmp_path / "data", tokenizer_fingerprint=one.fingerprint, **about))
    words = [str(tmp_path / "data"), "--tokenizer-type", "NullTokenizer", "--vocab-size", "300"]
    assert inspect_dataset(words) == 11
    assert "has id" in capsys.readouterr().err


def test_the_first_documents_are_sampled_and_ids_once(tmp_path: Path) -> None:
    one, _ = two_tokenizers(tmp_path)
    with IndexedDatasetBuilder(tmp_path / "data", "uint16") as builder:
        for first in (0, 100, 0, 200):
            builder.add_document(np.arange(first, first + 60), [60])
    sample = first_tokens(IndexedDataset(tmp_path / "data"), one)
    assert [number for number, _ in sample] == [*range(60), *range(100, 160), *range(200, 260)]
