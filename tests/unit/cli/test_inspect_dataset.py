"""Runs tools/inspect_dataset.py as a user types it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.cli.inspect_dataset import main
from megatron.data.indexed.builder import IndexedDatasetBuilder
from megatron.data.indexed.record import make_record, write_record
from megatron.errors import ConfigError, DataError
from megatron.tokenizer import TokenizerSettings, build_tokenizer

NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    tokenizer = build_tokenizer(TokenizerSettings(tokenizer_type="NullTokenizer", vocab_size=100))
    with IndexedDatasetBuilder(tmp_path / "d", "uint16") as builder:
        for n in range(20):
            builder.add_document([*range(n), tokenizer.eod])
    record = make_record(
        tmp_path / "d",
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod,
        max_id=tokenizer.eod,
        source=("corpus.json",),
        extra={"append_eod": True, "tokenizer_type": tokenizer.name},
    )
    write_record(tmp_path / "d", record)
    return str(tmp_path / "d")


def run(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(list(words)) == code
    said = capsys.readouterr()
    return said.err if code else said.out


def test_statistics(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = run(capsys, f"{prefix}.bin")  # the name of a file does as well
    assert "documents   20 (0 empty)" in said and "tokens      210 (uint16, 420 bytes, index: mmap)" in said
    assert "shortest 1, mean 10.5, longest 20 (document 19)" in said and "corpus.json" in said
    assert ".bin: 1 blocks, .idx: 1 blocks" in said and "at each document's end" in said


def test_a_document(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "document 3: 4 tokens in 1 sequences\n0 1 2 " in run(capsys, prefix, "--document", "3")
    assert "document 5: 6 tokens in 1 sequences\n0 1 2 3 4" in run(capsys, prefix, "--document", "5", *NULL)
    said = run(capsys, prefix, "--document", "9", "10", "--tokens", "2")
    assert "document 9: 10 tokens in 1 sequences, the first 2 (--tokens)\n0 1\n" in said and "document 10: 11" in said
    assert "document 20: " not in said
    assert "has 20 documents" in run(capsys, prefix, "--document", "20", code=ConfigError.exit_code)


def test_several_sequences_and_a_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with IndexedDatasetBuilder(tmp_path / "s", "uint16") as builder:
        builder.add_document([1, 2, 3, 4, 5], [2, 0, 3])
    said = run(capsys, str(tmp_path / "s"), "--tokens", "4")
    assert "document 0: 5 tokens in 3 sequences, the first 4 (--tokens)\n1 2 3 4\n" in said
    assert "record      none" in said


def test_verify(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = run(capsys, prefix, "--verify")
    assert "good: lengths and offsets, checksums of every block, ids below" in said and "not checked" not in said
    content = bytearray(Path(f"{prefix}.bin").read_bytes())
    content[100] ^= 1
    Path(f"{prefix}.bin").write_bytes(content)
    said = run(capsys, prefix, "--verify", code=DataError.exit_code)
    assert "d.bin: damaged: block 0, bytes 0 to 420 (documents 0 to 19)" in said and said.count("\n") == 1


def test_the_others_are_looked_at_after_a_damaged_one(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with IndexedDatasetBuilder(tmp_path / "sound", "uint16") as builder:
        builder.add_document([1, 2])
    Path(f"{prefix}.bin").write_bytes(b"")
    assert main([prefix, str(tmp_path / "sound"), "--verify"]) == DataError.exit_code
    said = capsys.readouterr()
    assert "sound: good" in said.out and "d.bin: 0 bytes" in said.err
    assert "sound: not checked: checksums of every block: there is no record" in said.out


def test_vocabulary_size_without_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with IndexedDatasetBuilder(tmp_path / "d", "uint16") as builder:
        builder.add_document([1, 200])
    words = [str(tmp_path / "d"), "--verify", "--vocab-size"]
    assert "token id 200, but ids must be 0 to 199" in run(capsys, *words, "200", code=DataError.exit_code)
    assert "ids below 201" in run(capsys, *words, "201")


def test_another_tokenizer(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "50"]
    assert "made with another tokenizer" in run(capsys, prefix, *words, code=DataError.exit_code)


def test_json(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, prefix, prefix, "--json", "--verify", "--document", "2", "--histogram").splitlines()
    facts: dict[str, Any] = json.loads(lines[0])
    assert len(lines) == 2 and facts["documents"] == 20 and facts["record"]["eod_id"] == facts["verified"]["max_id"]
    assert facts["shown"][0]["ids"][:2] == [0, 1] and sum(b["documents"] for b in facts["bins"]) == 20


def test_histogram(prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "16-31" in run(capsys, prefix, "--histogram")
    assert "histogram written" in run(capsys, prefix, "--histogram", str(tmp_path / "h.svg"))
    assert (tmp_path / "h.svg").read_text().startswith("<svg")
    said = run(capsys, "--histogram", prefix, prefix, code=ConfigError.exit_code)
    assert "the file must be a .svg or a .png; put prefixes before" in said
    said = run(capsys, prefix, prefix, "--histogram", "h.svg", code=ConfigError.exit_code)
    assert "draws only one dataset" in said


def test_png_without_matplotlib(
    prefix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = run(capsys, prefix, "--histogram", "h.png", code=ConfigError.exit_code)
    assert "pip install matplotlib" in said and not Path("h.png").exists()
