"""Runs tools/train_tokenizer.py as its users type it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.tokenizer.gpt2 import GPT2BPETokenizer
from tests.unit.preprocess.support import ROOT
from tests.unit.tokenizer.support import SAMPLES

TOOL = ROOT / "tools" / "train_tokenizer.py"


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), *flags], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    import json

    lines = [json.dumps({"content": text}) for text in SAMPLES * 3]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, ""]), encoding="utf-8")
    return tmp_path


FLAGS = ("--input", "in.jsonl", "--json-key", "content", "--output-dir", "out")


def test_its_files_are_a_gpt2_tokenizer_and_the_same_every_time(folder: Path) -> None:
    done = run(folder, *FLAGS, "--vocab-size", "400")
    assert done.returncode == 0, done.stderr
    assert "400 tokens" in done.stdout and "end of document is id 399" in done.stdout
    tokenizer = GPT2BPETokenizer(folder / "out" / "vocab.json", folder / "out" / "merges.txt")
    assert (tokenizer.vocab_size, tokenizer.eod) == (400, 399)
    assert tokenizer.detokenize(tokenizer.tokenize(SAMPLES[0])) == SAMPLES[0]
    first = (folder / "out" / "vocab.json").read_bytes(), (folder / "out" / "merges.txt").read_bytes()
    assert run(folder, *FLAGS, "--vocab-size", "400", "--overwrite").returncode == 0
    assert first == ((folder / "out" / "vocab.json").read_bytes(), (folder / "out" / "merges.txt").read_bytes())


def test_too_little_text_is_said(folder: Path) -> None:
    done = run(folder, *FLAGS, "--vocab-size", "50000", "--log-interval", "1")
    assert done.returncode == 0 and "Processed" in done.stderr
    assert "0 tokens," not in done.stderr and "s), 0 tokens" not in done.stderr
    assert "--vocab-size 50000: this text only gives" in done.stderr


def test_plain_text_is_rejected_with_the_command_that_converts_it(folder: Path) -> None:
    (folder / "in.txt").write_text("Once upon a time.\n")
    done = run(folder, "--input", "in.txt", "--vocab-size", "300", "--output-dir", "out")
    assert done.returncode == 11 and "in.txt:1: not JSON" in done.stderr
    assert done.stderr.endswith(" < in.txt > in.txt.jsonl ; then give --input in.txt.jsonl\n")


@pytest.mark.parametrize(
    ("flags", "code", "complaint"),
    [
        ("--vocab-size 100", 2, "--vocab-size 100: must be at least 257"),
        ("--vocab-size 10000000000", 2, "--vocab-size: 10000000000 is more than 2147483647"),
        ("--vocab-size 2147483647", 2, "--vocab-size 2147483647: must be at most 10000000"),
        ("--vocab-size 300 --json-kye content", 2, "--json-kye: no such flag; did you mean --json-key?"),
        ("", 2, "required: --vocab-size"),
    ],
)
def test_mistakes_are_one_line(folder: Path, flags: str, code: int, complaint: str) -> None:
    done = run(folder, *FLAGS, *flags.split())
    assert done.returncode == code and complaint in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (folder / "out").exists()


def test_bad_input_is_named_with_its_line(folder: Path) -> None:
    (folder / "in.jsonl").write_text('{"content": "a"}\n\n{"content": 1}\n', encoding="utf-8")
    done = run(folder, *FLAGS, "--vocab-size", "300")
    assert done.returncode == 11 and "in.jsonl:3: not text" in done.stderr and done.stderr.count("\n") == 1
    (folder / "in.jsonl").write_text("\n", encoding="utf-8")
    done = run(folder, *FLAGS, "--vocab-size", "300")
    assert done.returncode == 11 and "holds no documents" in done.stderr
    assert not (folder / "out").exists()


def test_an_output_that_cannot_be_is_named(folder: Path) -> None:
    flags = [*FLAGS[:-2], "--vocab-size", "300", "--output-dir"]
    done = run(folder, *flags, "in.jsonl/sub")
    assert done.returncode == 2 and "--output-dir in.jsonl/sub: in.jsonl is a file" in done.stderr
    done = run(folder, *flags, "/proc/no-such-place")
    assert done.returncode == 13 and "--output-dir /proc/no-such-place" in done.stderr
    done = run(folder, "--input", "in.jsonl", "--vocab-size", "300", "--output-dir", "out")
    assert done.returncode == 11 and "with --json-key, not" in done.stderr and done.stderr.count("\n") == 1


def test_existing_files_are_kept(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "merges.txt").write_text("precious", encoding="utf-8")
    done = run(folder, *FLAGS, "--vocab-size", "300")
    assert done.returncode == 2 and "merges.txt exists; give --overwrite" in done.stderr
    assert (folder / "out" / "merges.txt").read_text(encoding="utf-8") == "precious"
