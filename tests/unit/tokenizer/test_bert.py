"""BERT's WordPiece compared with `transformers`, with a vocabulary trained here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import BertWordPieceTokenizer as Trainer

from megatron.errors import ConfigError, DataError
from megatron.tokenizer import Tokenizer, TokenizerSettings, build_tokenizer
from tests.unit.tokenizer.support import NASTY, SAMPLES

SPECIAL = "[CLS] a [SEP] [MASK] [UNK] [BOS] b[EOS]"


@pytest.fixture(scope="module", params=["BertWordPieceLowerCase", "BertWordPieceCase"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def vocab(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(kind)
    trainer = Trainer(lowercase=kind.endswith("LowerCase"))
    trainer.train_from_iterator(list(SAMPLES) * 3, vocab_size=400, min_frequency=1, show_progress=False)
    trainer.save_model(str(directory))
    return directory / "vocab.txt"


def build(kind: str, vocab: Path) -> Tokenizer:
    return build_tokenizer(TokenizerSettings(tokenizer_type=kind, vocab_file=str(vocab)))


@pytest.fixture(scope="module")
def theirs(kind: str, vocab: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    tokens = vocab.read_text(encoding="utf-8").split("\n")
    known = {token: index for index, token in enumerate(tokens) if token}
    return transformers.BertTokenizer(vocab=known, do_lower_case=kind.endswith("LowerCase"))


def ids_of(theirs: Any, text: str) -> list[int]:
    return theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids


def test_ids_are_those_of_transformers(kind: str, vocab: Path, theirs: Any) -> None:
    ours = build(kind, vocab)
    for text in (*(text for text in NASTY if len(text) < 200), *SAMPLES):
        assert ours.tokenize(text) == ids_of(theirs, text) == ours.encode_batch([text])[0].tolist()


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(exclude_categories=("Cs", "Cn")), max_size=60))
def test_any_text_gives_their_ids(kind: str, vocab: Path, theirs: Any, text: str) -> None:
    assert build(kind, vocab).tokenize(text) == ids_of(theirs, text)


def test_special_text_is_text(kind: str, vocab: Path) -> None:
    ours = build(kind, vocab)
    names = vocab.read_text(encoding="utf-8").split("\n")
    special = {names.index(token) for token in ("[CLS]", "[SEP]", "[MASK]")} | {
        ours.vocab_size - 1,
        ours.vocab_size - 2,
    }
    assert not special & set(ours.tokenize(SPECIAL))


def test_begin_and_end_are_added_and_no_end_of_document_exists(kind: str, vocab: Path) -> None:
    ours = build(kind, vocab)
    assert ours.vocab_size == len(vocab.read_text(encoding="utf-8").splitlines()) + 2
    assert ours.eod_id is None
    with pytest.raises(ConfigError, match="no end-of-document token; remove --append-eod"):
        _ = ours.eod


def test_long_words_follow_megatron_not_transformers(kind: str, vocab: Path) -> None:
    ours = build(kind, vocab)
    unknown = ours.tokenize("x" * 201)
    assert len(unknown) == 1 and len(ours.tokenize("x" * 200)) > 1


def test_the_export_opens_in_transformers(kind: str, vocab: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = build(kind, vocab)
    ours.save_pretrained(tmp_path, model_max_length=99)
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert auto.model_max_length == 99 and auto.pad_token == "[PAD]"
    for text in SAMPLES:
        assert auto(text, add_special_tokens=False).input_ids == ours.tokenize(text)
        assert auto.decode(ours.tokenize(text)) == ours.detokenize(ours.tokenize(text))
    assert build(kind, tmp_path / "vocab.txt").vocab_size == ours.vocab_size
    assert build(kind, tmp_path / "vocab.txt").fingerprint == ours.fingerprint
    assert ours.files() == {"vocab.txt": vocab}


def test_damaged_vocabularies_are_refused(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "vocab.txt"
    file.write_text("[UNK]\n[CLS]\n[SEP]\n[PAD]\na\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"vocab.txt: has no \[MASK\]"):
        build(kind, file)
    file.write_text("[UNK]\na\nb\na\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="'a' occurs twice"):
        build(kind, file)
    with pytest.raises(ConfigError, match="there is no such file"):
        build(kind, tmp_path / "none")


def test_a_lone_surrogate_is_refused(kind: str, vocab: Path) -> None:
    with pytest.raises(DataError, match="lone surrogate"):
        build(kind, vocab).encode_batch(["\ud800"])
