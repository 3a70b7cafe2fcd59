"""Settings to tokenizer: every type is built, or rejected with its name. Covers NullTokenizer and training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError, DataError
from megatron.tokenizer import TokenizerSettings, build_tokenizer
from megatron.tokenizer.gpt2 import GPT2BPETokenizer
from megatron.tokenizer.huggingface import HuggingFaceTokenizer
from megatron.tokenizer.null import NullTokenizer
from megatron.tokenizer.train import train_bpe
from tests.helpers.runs import flags
from tests.unit.tokenizer.support import SAMPLES, small_bpe, train_pieces, write_small_bpe


def build(**settings: Any) -> Any:
    return build_tokenizer(TokenizerSettings(**settings))


def test_vocab_and_merges_mean_gpt2(tmp_path: Path) -> None:
    vocab, merges = write_small_bpe(tmp_path)
    files = {"vocab_file": str(vocab), "merge_file": str(merges)}
    assert isinstance(build(**files), GPT2BPETokenizer)
    named = build(tokenizer_type="GPT2BPETokenizer", vocab_size=small_bpe().vocab_size, **files)
    assert named.vocab_size == small_bpe().vocab_size == max(small_bpe().vocab.values()) + 1


@pytest.mark.parametrize("name", ["HuggingFaceTokenizer", "HFTokenizer"])
def test_hugging_face_by_either_name(tmp_path: Path, name: str) -> None:
    GPT2BPETokenizer(*write_small_bpe(tmp_path)).save_pretrained(tmp_path)
    assert isinstance(build(tokenizer_type=name, tokenizer_model=str(tmp_path)), HuggingFaceTokenizer)


def test_special_tokens_named_by_flag_are_the_tokenizers_own(tmp_path: Path) -> None:
    """Existing tokens change nothing, as in Megatron-LM; others would get ids that no file has."""
    vocab, merges = write_small_bpe(tmp_path)
    GPT2BPETokenizer(vocab, merges).save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]))
    pieces = train_pieces(tmp_path / "tokenizer.model", user_defined_symbols=["<there>"])
    every = {
        "GPT2BPETokenizer": ({"vocab_file": str(vocab), "merge_file": str(merges)}, "<|endoftext|>"),
        "HuggingFaceTokenizer": ({"tokenizer_model": str(tmp_path)}, "<|endoftext|>"),
        "SentencePieceTokenizer": ({"tokenizer_model": str(pieces)}, "<there>"),
        "BertWordPieceCase": ({"vocab_file": str(tmp_path / "vocab.txt")}, "[SEP]"),
    }
    for kind, (files, token) in every.items():
        plain = build(tokenizer_type=kind, **files)
        named = build(tokenizer_type=kind, **files, tiktoken_special_tokens=(token,))
        assert named.fingerprint == plain.fingerprint and named.vocab_size == plain.vocab_size
        with pytest.raises(ConfigError, match=f"--tokenizer-special-tokens <x>: not in the vocabulary of this {kind}"):
            build(tokenizer_type=kind, **files, tiktoken_special_tokens=(token, "<x>"))


def test_the_config_section_fits() -> None:
    sections = pytest.importorskip("megatron.config.sections.data")
    config = sections.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=10)
    assert build_tokenizer(config).vocab_size == 11


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({}, "--tokenizer-type: not given"),
        ({"vocab_file": "v"}, "--tokenizer-type: not given"),
        ({"tokenizer_type": "GPT2BPETokenizer"}, "--vocab-file and --merge-file: not given"),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "v"}, "--merge-file: not given"),
        ({"tokenizer_type": "GPT2BPETokenizer", "tokenizer_model": "m"}, "--tokenizer-model m: GPT2BPETokenizer does"),
        ({"tokenizer_type": "HuggingFaceTokenizer"}, "--tokenizer-model: not given"),
        ({"tokenizer_type": "HFTokenizer", "vocab_file": "v"}, "--vocab-file v: HFTokenizer does not use it"),
        ({"tokenizer_type": "NullTokenizer"}, "--vocab-size: not given"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 0}, "--vocab-size 0"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 5, "merge_file": "m"}, "--merge-file m: NullTokenizer does"),
        (
            {"tokenizer_type": "SentencePieceTokenizer"},
            "--tokenizer-model: not given; --tokenizer-type SentencePieceTokenizer needs",
        ),
        (
            {"tokenizer_type": "TikTokenizer"},
            "--tokenizer-model: not given; --tokenizer-type TikTokenizer needs a JSON list",
        ),
        ({"tokenizer_type": "Llama2Tokenizer", "vocab_file": "v"}, "--vocab-file v: Llama2Tokenizer does not use it"),
        (
            {"tokenizer_type": "BertWordPieceCase"},
            "--vocab-file: not given; --tokenizer-type BertWordPieceCase needs BERT's vocab.txt",
        ),
        ({"tokenizer_type": "BertWordPieceCase", "merge_file": "m"}, "--merge-file m: BertWordPieceCase does not"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 9, "encoder": "fast"}, "NullTokenizer has no fast encoder"),
        ({"tokenizer_type": "TikTokenizer", "encoder": "fast"}, "--encoder fast: TikTokenizer has no fast encoder"),
        (
            {"tokenizer_type": "NullTokenizer", "vocab_size": 9, "tiktoken_special_tokens": ("<s>", "<x>")},
            "--tokenizer-special-tokens <s> <x>: not in the vocabulary of this NullTokenizer",
        ),
        ({"tokenizer_type": "BertWordPieceCase", "null_tokenizer_eod_id": 3}, "--null-tokenizer-eod-id 3: BertWordP"),
        (
            {"tokenizer_type": "NullTokenizer", "vocab_size": 9, "null_tokenizer_eod_id": 10},
            "--null-tokenizer-eod-id 10: not in the vocabulary of --vocab-size 9; give 0 to 8",
        ),
        ({"tokenizer_type": "MultimodalTokenizer"}, "not for GPT pretraining"),
        ({"tokenizer_type": "GPT2Tokenizer"}, "no such tokenizer; did you mean GPT2BPETokenizer?"),
    ],
)
def test_what_cannot_be_built_is_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(**settings)
    assert complaint in str(error.value) and "\n" not in str(error.value)


def test_a_vocabulary_size_that_is_not_the_tokenizers_is_refused(tmp_path: Path) -> None:
    vocab, merges = write_small_bpe(tmp_path)
    with pytest.raises(ConfigError, match=r"--vocab-size 7: the GPT2BPETokenizer has \d+ tokens"):
        build(vocab_file=str(vocab), merge_file=str(merges), vocab_size=7)


def test_a_new_type_needs_its_class_and_its_row_alone(tmp_path: Path) -> None:
    """CONTRIBUTING.md promises it: the flag, the checks of a run and the tools read the row."""
    (tmp_path / "letters.py").write_text(
        "from megatron.tokenizer.null import NullTokenizer\n"
        "class LetterTokenizer(NullTokenizer):\n"
        "    @classmethod\n"
        "    def from_settings(cls, config, *, encoder, announce): return cls(len(open(config.vocab_file).read()))\n"
    )
    code = (
        "import sys, megatron.tokenizer, megatron.tokenizer_types as types\n"
        f"megatron.tokenizer.__path__.append({str(tmp_path)!r})\n"
        "types.TOKENIZERS['LetterTokenizer'] = types.TokenizerType(\n"
        "    made_by='letters.LetterTokenizer', needs=('vocab_file',), what='letters')\n"
        "from megatron.errors import ConfigError\n"
        "from megatron.tokenizer import TokenizerSettings, build_tokenizer\n"
        "from megatron.training.settings import read_settings\n"
        "from megatron.training.initialize import tokenizer_of\n"
        "letters, *known = sys.argv[1:]\n"
        "argv = [*known, '--tokenizer-type', 'LetterTokenizer']\n"
        "print(tokenizer_of(read_settings([*argv, '--vocab-file', letters], needs_data=False)).vocab_size)\n"
        "print(build_tokenizer(TokenizerSettings(tokenizer_type='LetterTokenizer', vocab_file=letters)).vocab_size)\n"
        "try: read_settings(argv)\n"
        "except ConfigError as error: print(error)\n"
    )
    letters = tmp_path / "letters.txt"
    letters.write_text("abc")
    known = [word for word in flags() if word not in ("--vocab-size", "97")]
    done = subprocess.run([sys.executable, "-c", code, letters, *known], capture_output=True, text=True, check=False)
    needed = "--vocab-file: not given; --tokenizer-type LetterTokenizer needs letters"
    assert done.stdout.splitlines()[:2] == ["4", "4"] and needed in done.stdout, done.stdout + done.stderr


def test_importing_loads_neither_torch_nor_tokenizers() -> None:
    heavy = ("torch", "tokenizers", "transformers")
    code = f"import sys, megatron.tokenizer; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---------------------------------------------------------------- NullTokenizer


def test_null_reads_ids() -> None:
    null = NullTokenizer(100)
    assert (null.vocab_size, null.eod) == (101, 100)
    assert null.tokenize("5 0  99\n") == [5, 0, 99] and null.tokenize("") == []
    assert null.detokenize([5, 100]) == "5 100"
    assert null.files() == {} and null.fingerprint != NullTokenizer(99).fingerprint


@pytest.mark.parametrize("text", ["a", "-1", "100", "1.5", "٣", "9" * 50])
def test_null_refuses_what_is_no_id(text: str) -> None:
    with pytest.raises(DataError, match="is not allowed; give ids from 0 to 100"):
        NullTokenizer(100).tokenize(text)


def test_null_may_have_its_end_of_document_inside() -> None:
    inside = build(tokenizer_type="NullTokenizer", vocab_size=100, null_tokenizer_eod_id=0)
    assert (inside.vocab_size, inside.eod) == (100, 0)
    assert inside.tokenize("5 99 1") == [5, 99, 1]
    with pytest.raises(DataError, match="'0' is not allowed; give ids from 0 to 99"):
        inside.tokenize("5 0")
    last, usual = NullTokenizer(100, eod_id=99), NullTokenizer(99)  # the same ids
    assert (last.vocab_size, last.eod, last.fingerprint) == (usual.vocab_size, usual.eod, usual.fingerprint)
    assert inside.fingerprint != usual.fingerprint


def test_a_pattern_of_another_tokenizer_has_no_effect(tmp_path: Path) -> None:
    vocab, merges = write_small_bpe(tmp_path)
    files = {"vocab_file": str(vocab), "merge_file": str(merges)}
    assert build(**files, tiktoken_pattern="v1").tokenize("a b") == build(**files).tokenize("a b")


def test_null_has_nothing_to_export(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without a tokenizer"):
        NullTokenizer(5).save_pretrained(tmp_path)


# ---------------------------------------------------------------- training


def test_training_gives_bytes_then_merges_then_end_of_text() -> None:
    bpe = train_bpe(list(SAMPLES) * 3, 300)
    assert bpe.vocab_size == 300 and len(bpe.merges) == 300 - 257
    assert bpe.eod_id == 299 and len(set(bpe.vocab.values())) == 300
    assert [left + right for left, right in bpe.merges] == list(bpe.vocab)[256:-1]


def test_training_is_deterministic() -> None:
    assert train_bpe(list(SAMPLES), 400).fingerprint() == train_bpe(iter(SAMPLES), 400).fingerprint()


def test_too_little_text_gives_fewer_tokens() -> None:
    bpe = train_bpe(["ab ab ab"], 5000)
    assert 257 < bpe.vocab_size < 270 and bpe.eod_id == bpe.vocab_size - 1


def test_a_vocabulary_below_the_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="--vocab-size 256: must be at least 257"):
        train_bpe(["a"], 256)
