"""Selects the tokenizer.json files that are encoded fast; their ids equal those of `tokenizers`."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer

from megatron.errors import ConfigError, DataError
from megatron.tokenizer.byte_alphabet import CHARACTER_OF_BYTE
from megatron.tokenizer.fast import kinds as fast_kinds
from megatron.tokenizer.huggingface import HuggingFaceTokenizer
from tests.unit.tokenizer.support import NASTY, SAMPLES

SPLITS = {name: getattr(fast_kinds, name) for name in dir(fast_kinds) if name.endswith("_SPLIT")}
ADDED = ("<tool>", "</tool>", "<|endoftext|>")
# OpenAI's own spelling: to tokenizers' engine {1,3}+ repeats, to the fast one it is possessive.
POSSESSIVE = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)


def rust(pattern: str | None, **options: Any) -> RustTokenizer:
    made = RustTokenizer(models.BPE(ignore_merges=options.get("ignore_merges", False)))
    if pattern is None:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=options.get("prefix", False))
    else:
        split = pre_tokenizers.Split(Regex(pattern), options.get("behavior", "isolated"), options.get("invert", False))
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    if options.get("nfc"):
        made.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=list(CHARACTER_OF_BYTE), min_frequency=1, show_progress=False
    )
    made.train_from_iterator(list(SAMPLES) * 3, trainer)
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in options.get("plain", ())])
    made.add_special_tokens(["<|endoftext|>"])
    return made


def save(made: RustTokenizer, directory: Path, change: Callable[[dict[str, Any]], Any] | None = None) -> Path:
    description = json.loads(made.to_str())
    if change is not None:
        change(description)
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")
    return directory


def random_texts(seed: int, count: int) -> list[str]:
    """Characters of every category, new and combining ones, white space, token text and runs."""
    chance = random.Random(seed)
    codes = [code for code in range(0x30000) if not 0xD800 <= code < 0xE000]
    marks = [chr(code) for code in codes[:0x20000] if unicodedata.combining(chr(code))]
    pieces = (
        lambda: chance.choice((*NASTY, *ADDED, "'LL", "'ſ", " ", "\n", "\r\n", "\u00a0", "1234", "aB", "/\n")),
        lambda: chr(chance.choice(codes)) * chance.randint(1, 3),
        lambda: chance.choice("ea가\u0915") + "".join(chance.choices(marks, k=chance.randint(1, 3))),
        lambda: chance.choice(" \n\tax0.'_/") * chance.choice((1, 2, 15, 16, 17, 33)),
        lambda: chance.choice(SAMPLES)[chance.randrange(20) :][: chance.randint(1, 40)],
    )
    return ["".join(chance.choice(pieces)() for _ in range(chance.choice((1, 5, 40, 400)))) for _ in range(count)]


KINDS: list[tuple[str, str | None, dict[str, Any]]] = [
    ("gpt2", None, {}),
    ("prefix", None, {"prefix": True}),
    ("nfc", None, {"nfc": True}),
    *((name.lower(), pattern, {}) for name, pattern in SPLITS.items()),
    ("ignore merges", SPLITS["LLAMA3_SPLIT"], {"ignore_merges": True}),
    ("qwen", SPLITS["QWEN2_SPLIT"], {"nfc": True, "plain": ("<tool>", "</tool>")}),
    ("inverted", SPLITS["O200K_SPLIT"], {"behavior": "removed", "invert": True}),
]


@pytest.mark.parametrize(("pattern", "options"), [kind[1:] for kind in KINDS], ids=[kind[0] for kind in KINDS])
def test_known_kinds_give_the_ids_of_tokenizers(pattern: str | None, options: dict[str, Any], tmp_path: Path) -> None:
    directory = save(rust(pattern, **options), tmp_path)
    fast, exact = HuggingFaceTokenizer(directory, encoder="fast"), HuggingFaceTokenizer(directory)
    assert (fast.engine, exact.engine) == ("fast, guarded", "exact")
    texts = [*NASTY, *SAMPLES, *random_texts(1, 150)]
    for text, ids, expected in zip(texts, fast.encode_batch(texts), exact.encode_batch(texts), strict=True):
        assert ids.tolist() == expected.tolist(), ascii(text)


def refusal(directory: Path) -> str:
    with pytest.raises(ConfigError, match="--encoder fast: HuggingFaceTokenizer: ") as error:
        HuggingFaceTokenizer(directory, encoder="fast")
    assert "\n" not in str(error.value) and "give --encoder auto or exact" in str(error.value)
    assert HuggingFaceTokenizer(directory, encoder="auto").engine == "exact"
    return str(error.value)


def model_option(**options: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda description: description["model"].update(options)


def repeat_a_merge(description: dict[str, Any]) -> None:
    description["model"]["merges"].append(description["model"]["merges"][0])


def make_a_token_twice(description: dict[str, Any]) -> None:
    vocab, merges = description["model"]["vocab"], description["model"]["merges"]
    size = max(vocab.values()) + 1
    vocab.update({"qq": size, "qqq": size + 1})
    merges += [["q", "q"], ["q", "qq"], ["qq", "q"]]


def forget_a_byte(description: dict[str, Any]) -> None:
    del description["model"]["vocab"][CHARACTER_OF_BYTE[0]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (model_option(byte_fallback=True), "its model has byte_fallback True"),
        (model_option(end_of_word_suffix="</w>"), "its model has end_of_word_suffix"),
        (forget_a_byte, "does not have all 256 bytes"),
        (repeat_a_merge, "its list of merges contains a merge twice"),
        (make_a_token_twice, "two merges produce the same token"),
        (lambda d: d.update(normalizer={"type": "NFKC"}), "its normalizer is NFKC"),
        (
            lambda d: d.update(
                normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}
            ),
            "its normalizer is Lowercase",
        ),
        (lambda d: d.update(pre_tokenizer=None), "the tokenizer has no pre-tokenizer"),
        (lambda d: d["pre_tokenizer"].update(use_regex=False), "its pre-tokenizer is ByteLevel"),
        (
            lambda d: d.update(
                pre_tokenizer={
                    "type": "Sequence",
                    "pretokenizers": [{"type": "Digits", "individual_digits": True}, d["pre_tokenizer"]],
                }
            ),
            "its pre-tokenizer is Digits and ByteLevel",
        ),
    ],
)
def test_whatever_is_not_proved_is_refused(
    change: Callable[[dict[str, Any]], Any], reason: str, tmp_path: Path
) -> None:
    assert reason in refusal(save(rust(None), tmp_path, change))


def test_other_models_patterns_and_added_tokens_are_refused(tmp_path: Path) -> None:
    assert "its pre-tokenization pattern is unknown" in refusal(save(rust(POSSESSIVE), tmp_path / "a"))
    merged = rust(SPLITS["LLAMA3_SPLIT"], behavior="merged_with_next")
    assert "its pre-tokenization pattern is unknown" in refusal(save(merged, tmp_path / "b"))
    assert "added token '  ' occurs in nearly every text" in refusal(save(rust(None, plain=("  ",)), tmp_path / "c"))
    words = RustTokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    assert "its model is WordLevel, not a byte-level BPE" in refusal(save(words, tmp_path / "d"))


def test_the_possessive_pattern_would_have_been_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepting the pattern would show in the probe texts."""
    monkeypatch.setattr(fast_kinds, "KNOWN_SPLITS", (POSSESSIVE,))
    assert "its ids differ from the exact ones on this vocabulary, as for" in refusal(save(rust(POSSESSIVE), tmp_path))


def test_a_token_outside_the_byte_alphabet_is_never_made(tmp_path: Path) -> None:
    """The fast library would use 中 for its three bytes; in tokenizers the token cannot occur."""

    def add(description: dict[str, Any]) -> None:
        vocab = description["model"]["vocab"]
        vocab["中"] = max(vocab.values()) + 100

    directory = save(rust(SPLITS["LLAMA3_SPLIT"], ignore_merges=True), tmp_path, add)
    fast, exact = HuggingFaceTokenizer(directory, encoder="fast"), HuggingFaceTokenizer(directory)
    assert fast.encode_batch(["中"])[0].tolist() == exact.tokenize("中")


def test_an_end_of_document_that_text_can_spell_is_refused_in_text(tmp_path: Path) -> None:
    directory = save(rust(None), tmp_path)
    word = "hello" if "hello" in json.loads(rust(None).to_str())["model"]["vocab"] else "Ġthe"
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": word}), encoding="utf-8")
    fast = HuggingFaceTokenizer(directory, encoder="fast")
    assert fast.encode_batch(["fine"])
    with pytest.raises(DataError, match="to the end-of-document id"):
        fast.encode_batch(["so hello the hello", word.replace("Ġ", " ")])
