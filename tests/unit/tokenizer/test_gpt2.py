"""GPT-2 BPE: `tokenizers` against the plain-Python twin, and mismatched files."""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.errors import ConfigError, DataError
from megatron.tokenizer import gpt2
from megatron.tokenizer.bpe_files import read_bpe
from megatron.tokenizer.byte_alphabet import BYTE_OF_CHARACTER, CHARACTER_OF_BYTE
from megatron.tokenizer.fast.words import WORD_OR_LINE_END, split_at_words
from megatron.tokenizer.gpt2 import GPT2BPETokenizer
from tests.helpers import python_bpe
from tests.helpers.python_bpe import PythonBPE
from tests.unit.tokenizer.support import NASTY, SAMPLES, small_bpe, write_small_bpe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bpe")
    write_small_bpe(directory)
    return directory


def build(folder: Path, **options: object) -> GPT2BPETokenizer:
    return GPT2BPETokenizer(folder / "vocab.json", folder / "merges.txt", **options)  # type: ignore[arg-type]


def build_twin(folder: Path) -> PythonBPE:
    return PythonBPE(read_bpe(folder / "vocab.json", folder / "merges.txt"))


@pytest.fixture(scope="module")
def fast(folder: Path) -> GPT2BPETokenizer:
    return build(folder)


@pytest.fixture(scope="module")
def twin(folder: Path) -> PythonBPE:
    return build_twin(folder)


# Characters without a category in Python's table may be known to one of the two engines' newer tables.
ASSIGNED = st.characters(exclude_categories=("Cs", "Cn"))
TEXTS = st.text(
    st.one_of(
        ASSIGNED,
        st.sampled_from(" \n\t'srtvmd<|>endoftext0a\u00a0\u2003"),
        st.characters(categories=("Mn", "Zs", "So", "Nd", "No", "Lo", "Sk", "Cf", "Co")),
    ),
    max_size=80,
)


def test_every_byte_has_one_character() -> None:
    assert len(BYTE_OF_CHARACTER) == 256
    assert CHARACTER_OF_BYTE[ord(" ")] == "Ġ" and CHARACTER_OF_BYTE[ord("\n")] == "Ċ"


@settings(max_examples=600, deadline=None)
@given(text=TEXTS)
def test_the_twin_equals_tokenizers(fast: GPT2BPETokenizer, twin: PythonBPE, text: str) -> None:
    ids = fast.tokenize(text)
    assert twin.tokenize(text) == ids
    assert fast.detokenize(ids) == text == twin.detokenize(ids)


@pytest.mark.parametrize("text", [*NASTY, *SAMPLES])
def test_the_twin_equals_tokenizers_on_known_troubles(fast: GPT2BPETokenizer, twin: PythonBPE, text: str) -> None:
    assert twin.tokenize(text) == fast.tokenize(text)
    assert fast.encode_batch([text])[0].tolist() == fast.tokenize(text)


def test_the_twin_equals_tokenizers_on_every_assigned_character(fast: GPT2BPETokenizer, twin: PythonBPE) -> None:
    characters = (chr(code) for code in range(sys.maxunicode + 1))
    assigned = [c for c in characters if unicodedata.category(c) not in ("Cs", "Cn", "Co")]
    text = "".join(f"a{c} {c}1{c}" for c in assigned)
    assert twin.tokenize(text) == fast.tokenize(text)


def test_the_comparison_sees_a_wrong_order_of_merges(
    fast: GPT2BPETokenizer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = python_bpe.merge_all
    monkeypatch.setattr(python_bpe, "merge_all", lambda s, rank: right(s, {m: -r for m, r in rank.items()}))
    text = "".join(SAMPLES)
    assert build_twin(folder).tokenize(text) != fast.tokenize(text)


def test_the_comparison_sees_a_wrong_word_pattern(
    fast: GPT2BPETokenizer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python_bpe, "GPT2_PATTERN", python_bpe.GPT2_PATTERN.replace(r"|\s+(?!\S)", ""))
    assert build_twin(folder).tokenize("x   in") != fast.tokenize("x   in")


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 400), max_size=30))
def test_any_ids_decode_alike(fast: GPT2BPETokenizer, twin: PythonBPE, ids: list[int]) -> None:
    ids = [index % fast.vocab_size for index in ids]
    assert fast.detokenize(ids) == twin.detokenize(ids)  # broken UTF-8 included


def test_a_word_of_a_megabyte_is_not_quadratic(fast: GPT2BPETokenizer, twin: PythonBPE) -> None:
    word = "hello" * 40_000
    assert twin.tokenize(word) == fast.tokenize(word)


def test_text_that_looks_like_a_special_token_is_text(fast: GPT2BPETokenizer, twin: PythonBPE) -> None:
    pieces = [fast.tokenize(part) for part in ("<|", "endoftext", "|>")]
    for tokenizer in (fast, twin):
        ids = tokenizer.tokenize("<|endoftext|>")
        assert ids == [index for piece in pieces for index in piece]
        assert fast.eod not in ids and fast.eod == small_bpe().vocab["<|endoftext|>"]


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, size=st.integers(1, 20))
def test_parts_encode_to_the_whole(fast: GPT2BPETokenizer, text: str, size: int) -> None:
    parts = list(split_at_words(text, size, WORD_OR_LINE_END))
    assert "".join(parts) == text
    assert [i for part in parts for i in fast.tokenize(part)] == fast.tokenize(text)


def test_long_texts_are_encoded_in_parts(fast: GPT2BPETokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [*SAMPLES, ""]
    whole = [ids.tolist() for ids in fast.encode_batch(texts)]
    monkeypatch.setattr(gpt2, "PART_CHARACTERS", 16)
    assert [ids.tolist() for ids in fast.encode_batch(texts)] == whole


def test_a_lone_surrogate_is_refused(fast: GPT2BPETokenizer) -> None:
    with pytest.raises(DataError, match=r"lone surrogate \(U\+D800 at character 1\)"):
        fast.tokenize("a\ud800")


# ---------------------------------------------------------------- identity


def test_the_fingerprint_is_of_the_content(folder: Path, tmp_path: Path) -> None:
    vocab, merges = write_small_bpe(tmp_path)
    vocab.write_text(vocab.read_text(encoding="utf-8").replace(", ", ",\n  "), encoding="utf-8")
    merges.write_bytes(merges.read_bytes().replace(b"\n", b"\r\n").removeprefix(b"#version: 0.2\r\n"))
    assert build(tmp_path).fingerprint == build(folder).fingerprint
    lines = merges.read_text(encoding="utf-8").splitlines()
    lines[10], lines[11] = lines[11], lines[10]
    merges.write_text("\n".join(lines), encoding="utf-8")
    assert build(tmp_path).fingerprint != build(folder).fingerprint


def test_files_are_what_a_checkpoint_keeps(folder: Path, fast: GPT2BPETokenizer) -> None:
    assert fast.files() == {"vocab.json": folder / "vocab.json", "merges.txt": folder / "merges.txt"}


# ---------------------------------------------------------------- files that cannot be right


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_merges_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    _, merges = write_small_bpe(tmp_path)
    merges.write_text(merges.read_text(encoding="utf-8") + "q q\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"merges.txt does not fit .*vocab.json: merge \d+ \(q q\) .* 'qq'"):
        build(tmp_path)


def test_merges_that_were_cut_short_are_refused(tmp_path: Path) -> None:
    _, merges = write_small_bpe(tmp_path)
    lines = merges.read_text(encoding="utf-8").splitlines()
    merges.write_text("\n".join(lines[: len(lines) // 2]), encoding="utf-8")
    with pytest.raises(ConfigError, match="truncated or belong to another tokenizer"):
        build(tmp_path)


def test_a_few_tokens_that_no_merge_makes_are_fine(tmp_path: Path) -> None:
    vocab, _ = write_small_bpe(tmp_path)
    edit(vocab, "{", '{"<|fim|>": 5000, ')
    assert build(tmp_path).vocab_size == 5001


def test_a_vocabulary_that_cannot_spell_every_byte_is_refused(tmp_path: Path) -> None:
    vocab, _ = write_small_bpe(tmp_path)
    edit(vocab, '"Ā": ', '"<unused>": ')
    with pytest.raises(ConfigError, match="no token for byte 0x00"):
        build(tmp_path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("not json", "not JSON"),
        ("[1]", "not an object of token -> id"),
        ('{"a": "b"}', "not an object of token -> id"),
        ("{}", "not an object of token -> id"),
        ('{"a": 1, "b": 1}', "two tokens have the same id"),
    ],
)
def test_a_damaged_vocabulary_is_refused(tmp_path: Path, content: str, complaint: str) -> None:
    vocab, _ = write_small_bpe(tmp_path)
    vocab.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"--vocab-file .*{complaint}"):
        build(tmp_path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "holds no merges"),
        (b"#version: 0.2\na b\nabc\n", "line 3: 'abc' is not two tokens"),
        (b"a b c\n", "line 1"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_damaged_merges_are_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    _, merges = write_small_bpe(tmp_path)
    merges.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"--merge-file .*{complaint}"):
        build(tmp_path)


@pytest.mark.parametrize("missing", ["vocab.json", "merges.txt"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    write_small_bpe(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(ConfigError, match=rf"{missing}: there is no such file"):
        build(tmp_path)


def test_a_vocabulary_without_end_of_text_is_refused_when_it_is_needed(tmp_path: Path) -> None:
    vocab, _ = write_small_bpe(tmp_path)
    edit(vocab, "<|endoftext|>", "<|other|>")
    tokenizer = build(tmp_path)
    assert tokenizer.eod_id is None and tokenizer.tokenize("a")
    with pytest.raises(ConfigError, match=r"vocab.json has no <\|endoftext\|>"):
        _ = tokenizer.eod
