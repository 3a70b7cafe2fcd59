"""Untrusted vocabularies are accepted or rejected in one line, and no text makes a library panic."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError, DataError
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.bert import NEEDED, BertWordPieceTokenizer
from megatron.tokenizer.gpt2 import GPT2BPETokenizer
from megatron.tokenizer.huggingface import HuggingFaceTokenizer
from megatron.tokenizer.tik import TikTokenizer
from tests.helpers.mutations import only_our_errors, texts
from tests.unit.tokenizer.support import write_small_bpe

COUNT = 200
TEXTS = ["a text", "ü\n\x00 \u200b", "", "ab" * 300]


def use(tokenizer: Tokenizer) -> None:
    for ids in tokenizer.encode_batch(TEXTS):
        tokenizer.detokenize(ids.tolist())
    tokenizer.tokenize(TEXTS[0]), tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eod_id


def damaged_lines(lines: list[str], count: int, seed: int) -> Iterator[str]:
    """Texts in which lines are missing, doubled, swapped or replaced."""
    choose = random.Random(seed)
    odd = ("", " ", "a b c", "\x00", "\ufeff", "é" * 300, "##", "-1", "x" * 10**6, "IQ== 99999999999999999999")
    for _ in range(count):
        changed = list(lines)
        for _ in range(choose.choice((1, 2))):
            place = choose.randrange(len(changed))
            if choose.random() < 0.3:
                del changed[place]
            elif choose.random() < 0.3:
                changed.insert(place, changed[choose.randrange(len(changed))])
            else:
                changed[place] = choose.choice(odd)
        yield "\n".join(changed)


def reader(path: Path, make: Callable[[], Tokenizer]) -> Callable[[str], None]:
    def read(text: str) -> None:
        path.write_text(text, encoding="utf-8")
        use(make())

    return read


def ranks() -> list[dict[str, Any]]:
    tokens = [bytes([byte]) for byte in range(256)] + [b"ab", b"abab"]
    return [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": repr(token)}
        for rank, token in enumerate(tokens)
    ]


def test_ranks_of_tiktoken(tmp_path: Path) -> None:
    path = tmp_path / "ranks"
    read = reader(path, lambda: TikTokenizer(path, num_special_tokens=10))
    taken, refused = only_our_errors(read, texts(ranks(), COUNT, 11))
    assert taken and refused
    lines = [f"{entry['token_bytes']} {entry['rank']}" for entry in ranks()]
    taken, refused = only_our_errors(read, damaged_lines(lines, COUNT, 12))
    assert refused


@pytest.mark.parametrize("lower_case", [True, False])
def test_vocab_txt_of_bert(tmp_path: Path, lower_case: bool) -> None:
    path = tmp_path / "vocab.txt"
    read = reader(path, lambda: BertWordPieceTokenizer(path, lower_case=lower_case))
    lines = [*NEEDED, *"abcdefghijklmnopqrstuvwxyz", *(f"##{letter}" for letter in "abtex"), "text"]
    taken, refused = only_our_errors(read, damaged_lines(lines, COUNT, 13))
    assert taken and refused


def test_merges_txt(tmp_path: Path) -> None:
    vocab, merges = write_small_bpe(tmp_path)
    read = reader(merges, lambda: GPT2BPETokenizer(vocab, merges))
    taken, refused = only_our_errors(read, damaged_lines(merges.read_text("utf-8").split("\n"), COUNT, 14))
    assert taken and refused


@pytest.mark.parametrize("model", [{"type": "BPE", "vocab": {}, "merges": []}, {"type": "Unigram", "vocab": []}])
def test_a_vocabulary_without_tokens_is_one_line(tmp_path: Path, model: dict[str, Any]) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    with pytest.raises(ConfigError, match=r"tokenizer\.json: has no tokens"):
        HuggingFaceTokenizer(tmp_path / "tokenizer.json")


class PanicException(BaseException):
    """Imitates the exception of Rust libraries, which does not derive from Exception."""


def panics(*given: Any, **options: Any) -> Any:
    raise PanicException("index out of bounds:\n the len is 1")


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_a_panic_of_the_library_is_one_line(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "gpt2":
        tokenizer: Any = GPT2BPETokenizer(*write_small_bpe(tmp_path))
    else:
        path = tmp_path / "vocab.txt"
        path.write_text("\n".join([*NEEDED, "a"]))
        tokenizer = BertWordPieceTokenizer(path, lower_case=True)

    class Broken:
        encode = encode_batch_fast = decode = panics

    monkeypatch.setattr(tokenizer, "_rust", Broken)
    for call in (
        lambda: tokenizer.tokenize("a"),
        lambda: tokenizer.encode_batch(["a", "b"]),
        lambda: tokenizer.detokenize([0]),
    ):
        with pytest.raises(DataError) as caught:
            call()
        said = str(caught.value)
        assert "index out of bounds: the len is 1" in said and "\n" not in said and tokenizer.name in said


@pytest.mark.parametrize("ids", [[10**6], [-1], [2**40]])
def test_ids_that_are_none_are_one_line(tmp_path: Path, ids: list[int]) -> None:
    path = tmp_path / "ranks.json"
    path.write_text(json.dumps(ranks()))
    (tmp_path / "vocab.txt").write_text("\n".join([*NEEDED, "a"]))
    for tokenizer in (
        GPT2BPETokenizer(*write_small_bpe(tmp_path / "gpt2")),
        BertWordPieceTokenizer(tmp_path / "vocab.txt", lower_case=True),
        TikTokenizer(path, num_special_tokens=10),
    ):
        only_our_errors(tokenizer.detokenize, iter([ids]))
