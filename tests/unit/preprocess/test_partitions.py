"""Partitions merge to the files of a single run, or are rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.data.indexed.record import read_record, record_path
from megatron.data.merge import merge
from megatron.data.parts import find_prefixes, plan_groups
from megatron.errors import ConfigError
from megatron.preprocess.input.files import STDIN, InputFile
from megatron.preprocess.options import PreprocessSettings
from megatron.preprocess.run import prepare_splitter_for, preprocess
from megatron.tokenizer import TokenizerSettings

NULL = TokenizerSettings(tokenizer_type="NullTokenizer", vocab_size=1000)
WORLD = 3


def quiet(line: str) -> None:
    pass


def corpus(folder: Path) -> Path:
    """Two files of one name, and a third one."""
    for number, name in enumerate(("x/in.jsonl", "y/in.jsonl", "z.jsonl")):
        path = folder / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(b'{"a": "%d %d", "b": "7"}\n' % (number, i) for i in range(40)))
    return folder / "data"


def run(folder: Path, prefix: str, **changes: Any) -> None:
    given: dict[str, Any] = {
        "inputs": (str(folder / "data"),),
        "output_prefix": str(folder / prefix),
        "tokenizer": NULL,
        "append_eod": True,
        "json_keys": ("a",),
        "segment_bytes": 200,
    }
    preprocess(PreprocessSettings(**{**given, **changes}), quiet)


def run_merge(folder: Path) -> None:
    output = str(folder / "merged")
    merge(plan_groups(find_prefixes([str(folder / "part_part*_a_document")], output), output))


def test_a_merged_set_is_recorded_like_the_single_run(tmp_path: Path) -> None:
    corpus(tmp_path)
    run(tmp_path, "single")
    for rank in range(WORLD):
        run(tmp_path, "part", rank=rank, world=WORLD)
    run_merge(tmp_path)
    single, merged = tmp_path / "single_a_document", tmp_path / "merged"
    assert record_path(merged).read_bytes() == record_path(single).read_bytes()
    record = read_record(merged)
    assert record is not None and record.source == ("in.jsonl", "in.jsonl", "z.jsonl")


def test_half_of_two_sets_is_not_the_single_run(tmp_path: Path) -> None:
    corpus(tmp_path)
    for prefix in ("part", "again"):
        for rank in range(2):
            run(tmp_path, prefix, rank=rank, world=2)
    output = str(tmp_path / "merged")
    merge(plan_groups(find_prefixes([str(tmp_path / "*_part*_a_document")], output), output))
    record = read_record(output)
    assert record is not None and "settings" not in record.extra and record.documents == 240


def test_partitions_of_other_files_are_refused(tmp_path: Path) -> None:
    data = corpus(tmp_path)
    run(tmp_path, "part", rank=0, world=WORLD)
    (data / "new.jsonl").write_text('{"a": "5"}\n')
    for rank in (1, 2):
        run(tmp_path, "part", rank=rank, world=WORLD)
    with pytest.raises(
        ConfigError, match=r"part001_of_003_a_document: made from other --input files .* than .*part000"
    ):
        run_merge(tmp_path)
    assert not list(tmp_path.glob("merged*"))


def test_partitions_of_copies_elsewhere_are_of_one_whole(tmp_path: Path) -> None:
    data = corpus(tmp_path)
    run(tmp_path, "part", rank=0, world=2)
    elsewhere = tmp_path / "elsewhere"
    for path in sorted(data.rglob("*.jsonl")):
        copy = elsewhere / path.relative_to(data)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    run(tmp_path, "part", rank=1, world=2, inputs=(str(elsewhere),))
    run_merge(tmp_path)
    record = read_record(tmp_path / "merged")
    assert record is not None and record.documents == 120


def test_partitions_set_otherwise_are_refused(tmp_path: Path) -> None:
    corpus(tmp_path)
    run(tmp_path, "part", rank=0, world=2)
    run(tmp_path, "part", rank=1, world=2, json_keys=("a", "b"))
    with pytest.raises(ConfigError, match=r"part001_of_002_a_document: made with other settings than .*part000"):
        run_merge(tmp_path)


def test_overwrite_learns_sentences_anew_and_partitions_never_do(tmp_path: Path) -> None:
    pytest.importorskip("nltk", reason="pip install nltk")
    corpus(tmp_path)
    learned = tmp_path / "part.sentences.json"
    given: dict[str, Any] = {"split_sentences": True, "on_error": "skip"}
    run(tmp_path, "part", **given)
    first = learned.read_bytes()
    words = '{"a": "He met her. The man left."}\n'  # skipped by the tokenizer, and learned from
    (tmp_path / "data/z.jsonl").write_text(words * 40)
    for rank in range(2):
        run(tmp_path, "part", **given, rank=rank, world=2, overwrite=True)
        assert learned.read_bytes() == first
    run(tmp_path, "part", **given, overwrite=True)
    assert learned.read_bytes() != first


def test_a_pipe_is_split_by_what_was_learned_before(tmp_path: Path) -> None:
    pytest.importorskip("nltk", reason="pip install nltk")
    corpus(tmp_path)
    run(tmp_path, "out", split_sentences=True)
    first = (tmp_path / "out.sentences.json").read_bytes()
    pipe = InputFile("standard input", "stdin", 0, STDIN)
    given = PreprocessSettings(
        inputs=(STDIN,), output_prefix=str(tmp_path / "out"), tokenizer=NULL, split_sentences=True, overwrite=True
    )
    assert prepare_splitter_for(given, [pipe], quiet) is not None
    assert (tmp_path / "out.sentences.json").read_bytes() == first
