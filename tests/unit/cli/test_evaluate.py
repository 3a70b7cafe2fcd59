"""Any mistake in what is to be evaluated gives one line before a weight is read, and no result is written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.cli.evaluate import main
from megatron.data.indexed.builder import IndexedDatasetBuilder
from megatron.data.indexed.record import make_record, write_record
from megatron.tokenizer.export import bpe_file_texts, write_files
from megatron.tokenizer.train import train_bpe
from tests.equivalence.test_export_from_layouts import save
from tests.helpers.runs import flags
from tests.unit.tokenizer.support import SAMPLES, write_small_bpe

TEXT = "for i in range(100): total += values[i]"


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    vocab, merges = write_small_bpe(place)
    named = {"vocab_size": None, "vocab_file": vocab, "merge_file": merges, "make_vocab_size_divisible_by": 8}
    save(0, 1, flags(**named, num_layers=1, save=place / "run", save_interval=1))
    return place / "run"


Evaluate = Callable[..., tuple[int, list[str], Path]]


@pytest.fixture
def evaluate(load: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Evaluate:
    """(exit code, lines of errors and warnings, the results' file)"""

    def run(*words: Any) -> tuple[int, list[str], Path]:
        output, threads = tmp_path / "out.json", torch.get_num_threads()
        capsys.readouterr()
        try:
            code = main(["--load", str(load), "--output", str(output), *map(str, words)])
        except SystemExit as error:
            code = int(error.code or 0)
        finally:
            torch.set_num_threads(threads)
        told = capsys.readouterr().err.splitlines()
        return code, [line for line in told if line.startswith(("error", "warning"))], output

    return run


def lines(path: Path, *entries: Any) -> Path:
    path.write_text("".join((entry if isinstance(entry, str) else json.dumps(entry)) + "\n" for entry in entries))
    return path


def item(**changes: Any) -> dict[str, Any]:
    return {"context": "for i in", "choices": ["range", "values"], "gold": 0, **changes}


LONG = " ".join(SAMPLES)
BAD: dict[str, tuple[Any, tuple[str, ...], str]] = {
    "an empty file": (b" \n", (), "a.txt: is empty"),
    "no UTF-8": (b"caf\xe9 au lait", (), r"a.txt: not UTF-8 \(byte 0xe9 at 3\)"),
    "one token": (b"x", (), "a.txt: no document has a token to predict"),
    "no JSON": (["{"], (), "a.jsonl line 1: not JSON"),
    "no object": ([[1]], (), "a.jsonl line 1: a list, not an object"),
    "another key": ([{"content": TEXT}], (), r"line 1: has no text under 'text' \(its keys: content\); .*--json-key"),
    "a lone surrogate": (['{"text": "a \\ud800 b"}'], (), "line 1: .*lone surrogate"),
    "a stride above the window": (TEXT.encode(), ("--overlapping-eval", "17"), "--overlapping-eval 17: .*16 tokens"),
    "a window above the model's": (
        TEXT.encode(),
        ("--seq-length", "17"),
        "--seq-length 17: the model has only 16 positions",
    ),
    "WikiText of choices": ([item()], ("--task", "choices", "--detokenize", "wikitext"), "--detokenize: has no effect"),
    "LAMBADA of one word": ([{"text": "word"}], ("--task", "lambada"), "line 1: 'word' has fewer than two words"),
    "a prompt too long": (
        [{"text": LONG}],
        ("--task", "lambada"),
        "line 1: .*reads 16 at once; give --truncate-prompts",
    ),
    "a target too long": (
        [item(choices=[LONG, "x"])],
        ("--task", "choices", "--truncate-prompts"),
        "line 1: .*reads 16 at once; shorten the target",
    ),
    "no choices": ([item(choices=None)], ("--task", "choices"), "line 1: has no 'choices'"),
    "one choice": ([item(), item(choices=["x"])], ("--task", "choices"), "line 2: has no 'choices'"),
    "an empty choice": ([item(choices=["x", " "])], ("--task", "choices"), "line 1: choice 1 is empty"),
    "a choice twice": ([item(choices=["x", "x"])], ("--task", "choices"), "choice 1 is the same as choice 0"),
    "gold beyond the choices": ([item(gold=2)], ("--task", "choices"), "gold is 2; .*from 0 to 1"),
    "gold as a text": ([item(gold="range")], ("--task", "choices"), "gold is 'range'"),
    "nothing after the end of a document": (
        ['{"text": ""}'],
        ("--score-first-token",),
        "a.jsonl: no document has a token to predict; give it text",
    ),
    "a number as text": (['{"text": NaN}'], (), "line 1: has no text under 'text' but nan; "),
    "JSON too deep": (["[" * 100_000], (), "line 1: not JSON"),
    "no context": (
        [{"choices": ["a", "b"], "gold": 0}],
        ("--task", "choices"),
        "under 'context' .* which may be empty",
    ),
    "half a character in a choice": (
        ['{"context": "a", "choices": ["a", "\\ud800"], "gold": 0}'],
        ("--task", "choices"),
        "line 1: .*lone surrogate",
    ),
    "no such type": (TEXT.encode(), ("--dtype", "float8"), "--dtype float8: not one of"),
}


@pytest.mark.parametrize("what", BAD)
def test_it_is_one_line(what: str, evaluate: Evaluate, tmp_path: Path) -> None:
    content, words, message = BAD[what]
    if isinstance(content, bytes):
        data = tmp_path / "a.txt"
        data.write_bytes(content)
    else:
        data = lines(tmp_path / "a.jsonl", *content)
    code, told, output = evaluate("--data", data, *words)
    assert code in (2, 11) and len(told) == 1 and not output.exists()
    assert_said(told[0], message)


def assert_said(line: str, message: str) -> None:
    assert re.search(message, line), line


def test_missing_files_and_directories(evaluate: Evaluate, tmp_path: Path) -> None:
    code, told, _ = evaluate("--data", tmp_path / "nothing.txt")
    assert code == 2 and len(told) == 1 and "nothing.txt: cannot be read" in told[0]
    (tmp_path / "out.json").mkdir()
    code, told, _ = evaluate("--data", tmp_path / "nothing.txt")
    assert code == 2 and "is a directory" in told[0]


def write_indexed(prefix: Path, ids: list[int], fingerprint: str | None = None) -> Path:
    with IndexedDatasetBuilder(str(prefix), "uint16") as builder:
        builder.add_document(ids)
    if fingerprint is not None:
        record = make_record(prefix, tokenizer_fingerprint=fingerprint, vocab_size=500, eod_id=499, max_id=max(ids))
        write_record(prefix, record)
    return prefix


def test_tokens_of_another_tokenizer_are_refused(evaluate: Evaluate, tmp_path: Path) -> None:
    code, told, _ = evaluate("--data", write_indexed(tmp_path / "other", [1, 2, 3], "0" * 64))
    assert code == 11 and len(told) == 1
    assert_said(
        told[0], r"another tokenizer \(fingerprint 000000000000\) than the model's \(.*fingerprint [0-9a-f]{12}\)"
    )
    code, told, _ = evaluate("--data", write_indexed(tmp_path / "big", [1, 2, 60000]))
    assert code == 11 and "holds ids from 1 to 60000" in told[0]
    for task in ("lambada", "choices"):
        code, told, _ = evaluate("--data", tmp_path / "big", "--task", task)
        assert code == 2 and len(told) == 1 and "big holds tokens, which only --task perplexity reads" in told[0]
    code, told, _ = evaluate("--data", tmp_path / "big.bin", "--detokenize", "wikitext")
    assert code == 2 and "holds tokens, not text" in told[0]


def test_texts_shorter_than_a_window_are_said(evaluate: Evaluate, tmp_path: Path) -> None:
    code, told, output = evaluate("--data", lines(tmp_path / "a.jsonl", {"text": "for i in"}, {"text": "x"}))
    assert code == 0 and json.loads(output.read_text())["documents"] == 1
    assert len(told) == 2
    assert "skipped 1 documents" in told[0] and "shorter than the window of 16 tokens" in told[1]


def test_a_byte_order_mark_is_no_text(evaluate: Evaluate, tmp_path: Path) -> None:
    for name, content in (("a.txt", TEXT), ("a.jsonl", json.dumps({"text": TEXT}))):
        counted = []
        for mark in ("", "\ufeff"):
            (tmp_path / name).write_text(f"{mark}{content}", encoding="utf-8")
            code, _, output = evaluate("--data", tmp_path / name)
            found = json.loads(output.read_text())
            counted.append((code, found["counted_tokens"], found["bytes"], found["loss"]))
        assert counted[0] == counted[1] and counted[0][0] == 0


def test_a_choice_that_begins_another_is_said(evaluate: Evaluate, tmp_path: Path) -> None:
    data = lines(tmp_path / "a.jsonl", item(), item(choices=["range", "range(100)"]))
    code, told, output = evaluate("--data", data, "--task", "choices")
    assert code == 0 and json.loads(output.read_text())["items"] == 2
    assert len(told) == 1 and "1 items have a choice that is a prefix of another" in told[0] and "line 2" in told[0]


def test_the_tokenizer_of_another_model_is_named(evaluate: Evaluate, tmp_path: Path) -> None:
    write_files(tmp_path, bpe_file_texts(train_bpe(["another text"] * 3, 260)))
    data = lines(tmp_path / "a.jsonl", {"text": TEXT})
    own = ["--vocab-file", tmp_path / "vocab.json", "--merge-file", tmp_path / "merges.txt"]
    code, told, _ = evaluate("--data", data, *own)
    assert code == 11 and len(told) == 1
    assert_said(told[0], r"fingerprint [0-9a-f]{12}\) is not the model's \(.*fingerprint [0-9a-f]{12}\)")
