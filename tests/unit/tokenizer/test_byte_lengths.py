"""The bytes of ids equal those of their text, for every tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.tokenizer import Tokenizer, TokenizerSettings, build_tokenizer
from tests.unit.tokenizer.support import NASTY, SAMPLES, train_pieces, write_small_bpe

SPACES = "\n\t\r \u00a0"


def counted(tokenizer: Tokenizer, text: str) -> int:
    lengths = tokenizer.byte_lengths()
    assert lengths is not None and len(lengths) == tokenizer.vocab_size
    return int(lengths[tokenizer.tokenize(text)].sum())


def gpt2(folder: Path) -> Tokenizer:
    vocab, merges = write_small_bpe(folder)
    return build_tokenizer(TokenizerSettings(vocab_file=str(vocab), merge_file=str(merges)), announce=False)


def hugging_face(folder: Path) -> Tokenizer:
    gpt2(folder).save_pretrained(folder / "hf")
    return build_tokenizer(
        TokenizerSettings(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder / "hf")), announce=False
    )


@pytest.mark.parametrize("make", [gpt2, hugging_face])
def test_of_bytes_they_are_exact(make: object, tmp_path: Path) -> None:
    """Includes a token that is a part of a character."""
    tokenizer = make(tmp_path)  # type: ignore[operator]
    for text in (*SAMPLES, *NASTY):
        assert counted(tokenizer, text) == len(text.encode()), text
    assert tokenizer.byte_lengths()[tokenizer.eod] == 0
    assert any("\ufffd" in tokenizer.detokenize([index]) for index in range(tokenizer.vocab_size))


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"])
def test_of_pieces_a_text_has_one_space_more(kind: str, tmp_path: Path) -> None:
    """SentencePiece adds it in front, and decoding removes it."""
    model = str(train_pieces(tmp_path / "sp.model", normalization_rule_name="identity", remove_extra_whitespaces=False))
    tokenizer = build_tokenizer(TokenizerSettings(tokenizer_type=kind, tokenizer_model=model))
    for text in filter(None, (*SAMPLES, *NASTY)):
        assert counted(tokenizer, text) == len(text.encode()) + 1, text
    assert tokenizer.byte_lengths()[tokenizer.eod] == 0  # type: ignore[index]


def test_of_a_tokenizer_json_with_pieces(tmp_path: Path) -> None:
    """Covers word marks, single bytes, a word that is an added token, and special tokens, which count as zero bytes."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    for piece in ("\u2581", "a", "b", "\u2581ab", "ab"):
        vocab[piece] = len(vocab)
    specials = [{"id": number, "content": token} for number, token in enumerate(("<unk>", "<s>", "</s>"))]
    added = [{**each, "special": True} for each in specials] + [{"id": len(vocab), "content": "WORD", "special": False}]
    rest = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    replaced = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    content = {
        "version": "1.0",
        "added_tokens": [{**each, **rest} for each in added],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "\u2581"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            ],
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                replaced,
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "byte_fallback": True,
            "vocab": vocab,
            "merges": ["a b", "\u2581 ab"],
        },
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    settings = TokenizerSettings(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    tokenizer = build_tokenizer(settings, announce=False)
    for text in ("ab", "ab ab", "é ab 東京", "a  b", "abWORD"):
        assert counted(tokenizer, text) == len(text.encode()) + 1, text
    assert tokenizer.byte_lengths()[:3].tolist() == [0, 0, 0]  # type: ignore[index]


def test_of_tiktoken(tmp_path: Path) -> None:
    pytest.importorskip("tiktoken")
    from tests.unit.tokenizer.test_tik import write_json

    settings = TokenizerSettings(tokenizer_type="TikTokenizer", tokenizer_model=str(write_json(tmp_path)))
    tokenizer = build_tokenizer(settings)
    for text in (*SAMPLES, *NASTY):
        assert counted(tokenizer, text) == len(text.encode()), text


def test_of_words(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "word", "##ing", "."]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    settings = TokenizerSettings(tokenizer_type="BertWordPieceCase", vocab_file=str(tmp_path / "vocab.txt"))
    assert counted(build_tokenizer(settings), "a wording a") == len(" a wording a")


def test_ids_that_stand_for_no_text() -> None:
    settings = TokenizerSettings(tokenizer_type="NullTokenizer", vocab_size=10)
    assert build_tokenizer(settings).byte_lengths() is None
