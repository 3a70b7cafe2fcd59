"""TikTokenizer compared with tiktoken itself, from both kinds of file."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.errors import ConfigError, DataError
from megatron.tokenizer import Tokenizer, TokenizerSettings, build_tokenizer
from megatron.tokenizer.byte_alphabet import token_bytes
from megatron.tokenizer.tik import PATTERNS
from tests.unit.tokenizer.support import NASTY, SAMPLES, small_bpe

# tiktoken orders tokens by rank: the 256 bytes in their own order, then what the merges of a trained BPE make.
MERGED = [token_bytes(left + right) for left, right in small_bpe().merges]
RANKS = [*(bytes([byte]) for byte in range(256)), *MERGED]


def write_json(directory: Path, ranks: list[bytes] = RANKS) -> Path:
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode("utf-8", "replace")}
        for rank, token in enumerate(ranks)
    ]
    path = directory / "vocab.json"
    path.write_text(json.dumps(entries), encoding="utf-8")
    return path


def write_lines(directory: Path) -> Path:
    path = directory / "vocab.tiktoken"
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(RANKS)]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def build(path: Path, **options: Any) -> Tokenizer:
    return build_tokenizer(TokenizerSettings(tokenizer_type="TikTokenizer", tokenizer_model=str(path), **options))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_json(tmp_path_factory.mktemp("tik"))


def theirs(pattern: str, shift: int) -> tiktoken.Encoding:
    shifted = {token: rank + shift for rank, token in enumerate(RANKS)}
    return tiktoken.Encoding("oracle", pat_str=PATTERNS[pattern], mergeable_ranks=shifted, special_tokens={})


@pytest.mark.parametrize("pattern", ["v1", "v2"])
def test_ids_are_the_packages_own(ranks: Path, pattern: str) -> None:
    ours, oracle = build(ranks, tiktoken_pattern=pattern), theirs(pattern, 1000)
    for text in (*NASTY, *SAMPLES, "a</s><unk><SPECIAL_7>"):
        assert ours.tokenize(text) == oracle.encode_ordinary(text)
        assert ours.detokenize(ours.tokenize(text)) == text
    assert ours.encode_batch(SAMPLES)[1].tolist() == oracle.encode_ordinary(SAMPLES[1])


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(exclude_categories=("Cs",)), max_size=60))
def test_text_never_gives_a_special_token(ranks: Path, text: str) -> None:
    ids = build(ranks).tokenize(text + "</s>" + text)
    assert min(ids) >= 1000 and ids == theirs("v2", 1000).encode_ordinary(text + "</s>" + text)


def test_special_tokens_come_first(ranks: Path) -> None:
    ours = build(ranks)
    assert (ours.eod, ours.vocab_size) == (2, 1000 + len(RANKS))
    few = build(ranks, tiktoken_num_special_tokens=4, tiktoken_special_tokens=("</s>", "<s>", "<unk>"))
    assert (few.eod, few.vocab_size) == (0, 4 + len(RANKS))
    assert few.detokenize([0, 3]) == "</s><SPECIAL_3>"
    assert len({ours.fingerprint, few.fingerprint, build(ranks, tiktoken_pattern="v1").fingerprint}) == 3


def test_a_rank_file_is_the_same_tokenizer(ranks: Path, tmp_path: Path) -> None:
    lines = build(write_lines(tmp_path))
    assert lines.fingerprint == build(ranks).fingerprint and lines.tokenize("hello") == build(ranks).tokenize("hello")
    assert lines.files() == {"vocab.tiktoken": tmp_path / "vocab.tiktoken"}


def test_the_vocabulary_size_cuts_the_ranks(ranks: Path) -> None:
    cut = build(ranks, vocab_size=1300)
    assert cut.vocab_size == 1300 and max(cut.tokenize("".join(SAMPLES))) < 1300
    with pytest.raises(ConfigError, match="--vocab-size 9999: with 1000 special tokens and"):
        build(ranks, vocab_size=9999)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"tiktoken_pattern": "v3"}, "--tiktoken-pattern v3: no such pattern; choose from v1, v2"),
        ({"tiktoken_special_tokens": ("<s>",)}, "--tiktoken-special-tokens <s>: <unk> is missing"),
        ({"tiktoken_special_tokens": ("<s>", "<unk>", "</s>", "<s>")}, "a token occurs twice"),
        ({"tiktoken_num_special_tokens": 3}, "--tiktoken-num-special-tokens 3: there are 7 special tokens"),
    ],
)
def test_settings_that_do_not_fit_are_refused(ranks: Path, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(ranks, **options)
    assert complaint in str(error.value)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    damaged = tmp_path / "x.tiktoken"
    for content, complaint in (
        ("", "not a file of ranks for tiktoken"),
        ("abc", "not a file of ranks for tiktoken"),
        ("[1]", "not a file of ranks for tiktoken"),
        ("YQ== 0\nYg== 2\n", "ranks are not 0, 1, 2"),
        ("YQ== 0\n", "255 of 256 bytes are missing"),
    ):
        damaged.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError, match=complaint):
            build(damaged)
    with pytest.raises(ConfigError, match="a token occurs twice"):
        build(write_json(tmp_path, [*RANKS, RANKS[300]]))


def test_text_that_is_none_and_a_missing_package(ranks: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="lone surrogate"):
        build(ranks).encode_batch(["\ud800"])
    with pytest.raises(ConfigError, match="transformers cannot open tiktoken ranks"):
        build(ranks).save_pretrained(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "tiktoken", None)
    with pytest.raises(ConfigError, match="pip install tiktoken"):
        build(ranks)
