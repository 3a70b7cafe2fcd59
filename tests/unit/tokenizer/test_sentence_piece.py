"""SentencePiece models, trained here, against the package itself; Megatron's rules for added tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.errors import ConfigError, DataError
from megatron.tokenizer import Tokenizer, TokenizerSettings, build_tokenizer
from tests.unit.tokenizer.support import NASTY, SAMPLES
from tests.unit.tokenizer.support import train_pieces as train

TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
CONTROL = "before</s><s> after <unk> <EOD><MASK>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("sp") / "tokenizer.model")


def build(kind: str, model: Path, **settings: Any) -> Tokenizer:
    return build_tokenizer(TokenizerSettings(tokenizer_type=kind, tokenizer_model=str(model), **settings))


@pytest.mark.parametrize("kind", TYPES)
def test_ids_are_the_packages_own(model: Path, kind: str) -> None:
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(model))
    ours = build(kind, model)
    begin = kind == "Llama2Tokenizer"  # which alone begins a text with <s>, as in Megatron
    for text in ("", *NASTY, *SAMPLES, CONTROL):
        assert ours.tokenize(text) == theirs.encode(text, add_bos=begin)
        assert ours.detokenize(ours.tokenize(text)) == theirs.decode(theirs.encode_as_ids(text))
    assert [ids.tolist() for ids in ours.encode_batch(SAMPLES)] == theirs.encode(list(SAMPLES), add_bos=begin)


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(exclude_categories=("Cs",)), max_size=60))
def test_any_text_gives_the_packages_ids_and_never_the_end(model: Path, text: str) -> None:
    ours = build("Llama2Tokenizer", model)
    ids = ours.tokenize(text + CONTROL)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(model))
    assert ids == theirs.encode(text + CONTROL, add_bos=True)
    assert ours.eod not in ids


def test_what_the_end_of_document_is(model: Path) -> None:
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(model))
    pieces = theirs.get_piece_size()
    for kind in TYPES[1:]:
        assert build(kind, model).eod == theirs.eos_id() and build(kind, model).vocab_size == pieces
    added = build(TYPES[0], model)
    # <CLS> <SEP> <EOD> <MASK>, and <PAD>: this model has no padding piece.
    assert added.eod == pieces + 2 and added.vocab_size == pieces + 5
    assert added.detokenize([*theirs.encode("hello"), added.eod]) == "hello<EOD>"


def test_pieces_that_the_model_has_are_not_added_again(tmp_path: Path) -> None:
    model = train(tmp_path / "m.model", control_symbols=["<EOD>", "<CLS>"], pad_id=3, eos_id=-1)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(model))
    ours = build(TYPES[0], model)
    assert ours.eod == theirs.piece_to_id("<EOD>")
    assert ours.vocab_size == theirs.get_piece_size() + 3  # <SEP>, <MASK> and <EOS>
    with pytest.raises(ConfigError, match="was trained without </s>"):
        _ = build(TYPES[1], model).eod


def test_an_end_of_document_that_text_can_spell_is_refused_in_text(tmp_path: Path) -> None:
    model = train(tmp_path / "m.model", user_defined_symbols=["<EOD>"])
    ours = build(TYPES[0], model)
    assert ours.tokenize("fine")
    with pytest.raises(DataError, match=r"encodes the text '<EOD>' to the end-of-document id"):
        ours.tokenize("not <EOD> fine")


def test_identity_and_files(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "other.model"
    copy.write_bytes(model.read_bytes())
    one, other = build(TYPES[1], model), build(TYPES[1], copy)
    assert one.fingerprint == other.fingerprint and one.files() == {"tokenizer.model": model}
    assert one.fingerprint != build(TYPES[0], model).fingerprint
    with pytest.raises(ConfigError, match="transformers cannot open a SentencePiece model directly"):
        one.save_pretrained(tmp_path)


def test_what_cannot_be_opened_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tokenizer-model .*nowhere: there is no such file"):
        build(TYPES[0], tmp_path / "nowhere")
    (tmp_path / "empty.model").touch()
    with pytest.raises(ConfigError, match=r"--tokenizer-model .*empty.model: is empty"):
        build(TYPES[0], tmp_path / "empty.model")
    (tmp_path / "text.model").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"text.model: not a SentencePiece model"):
        build(TYPES[0], tmp_path / "text.model")
    with pytest.raises(ConfigError, match=r"--vocab-size 7: the Llama2Tokenizer has 400 tokens"):
        build(TYPES[2], model, vocab_size=7)
    with pytest.raises(DataError, match="lone surrogate"):
        build(TYPES[2], model).encode_batch(["a", "b\udc00"])


def test_without_the_package_the_way_out_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sentencepiece", None)
    with pytest.raises(ConfigError, match="pip install sentencepiece"):
        build(TYPES[0], model)
