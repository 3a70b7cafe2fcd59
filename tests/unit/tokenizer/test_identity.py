"""Two files of one tokenizer have one fingerprint; a file that gives a text other ids has another."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.indexed.record import DataRecord, check_tokenizer
from megatron.errors import DataError
from megatron.tokenizer.bpe_files import BPE
from megatron.tokenizer.huggingface import HuggingFaceTokenizer
from megatron.tokenizer.identity import _as_read, earlier_fingerprint
from tests.helpers.chats import byte_alphabet

transformers = pytest.importorskip("transformers")

TEXTS = ("He said 1234 hello the  hill\n\n x 99", "<tool> e\u0301 étoile <|im_end|>", " a\t b ou 🙂 ", "ﬁ Ⅷ \u00a0x")
SPLIT = {
    "type": "Split",
    "pattern": {"Regex": r"\p{N}{1,3}| ?\p{L}+|\s+|[^\s\p{L}\p{N}]+"},
    "behavior": "Isolated",
    "invert": False,
}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
PREPEND = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}


def bpe() -> dict[str, Any]:
    """A file like Llama 3's or Qwen2's: its own pattern, NFC, and an added token that is not special."""
    letters = [*byte_alphabet(), "he", "ll", "hell", "Ġt"]
    return {
        "version": "1.0",
        "added_tokens": [
            {**TOKEN, "id": 260, "content": "<tool>", "special": False},
            {**TOKEN, "id": 261, "content": "<|im_end|>", "special": True},
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, BYTES]},
        "post_processor": {**BYTES, "trim_offsets": False},
        "decoder": BYTES,
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(letters)},
            "merges": [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "t")],
        },
    }


def unigram() -> dict[str, Any]:
    pieces = [["<unk>", 0.0], ["▁", -2.0], *([chr(letter), -3.0] for letter in range(97, 123)), ["▁hell", -1.0]]
    return {
        "version": "1.0",
        "added_tokens": [{**TOKEN, "id": 29, "content": "<|im_end|>", "special": True}],
        "normalizer": {"type": "NFKC"},
        "pre_tokenizer": PREPEND,
        "post_processor": None,
        "decoder": PREPEND,
        "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False},
    }


def opened(folder: Path, content: dict[str, Any], **config: Any) -> HuggingFaceTokenizer:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return HuggingFaceTokenizer(folder)


def without(content: dict[str, Any], name: str) -> dict[str, Any]:
    model = {key: value for key, value in content["model"].items() if key != name}
    return {**content, "model": model}


def edited(content: dict[str, Any], *names: str | int, **changes: Any) -> dict[str, Any]:
    content = part = copy.deepcopy(content)
    for name in names:
        part = part[name]  # type: ignore[index]
    part.update(changes)
    return content


def ids(tokenizer: HuggingFaceTokenizer) -> list[list[int]]:
    return [tokenizer.tokenize(text) for text in TEXTS]


@pytest.mark.parametrize("make", [bpe, unigram])
def test_saved_by_transformers_it_is_the_same_tokenizer(make: Callable[[], dict[str, Any]], tmp_path: Path) -> None:
    before = opened(tmp_path / "before", make())
    again = tmp_path / "again"
    transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "before").save_pretrained(again)
    after = HuggingFaceTokenizer(again)
    assert (again / "tokenizer.json").read_text() != (tmp_path / "before" / "tokenizer.json").read_text()
    assert before.fingerprint == after.fingerprint and ids(before) == ids(after)


def sequence(name: str, *steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", name: list(steps)}


REWRITTEN = {
    "defaults": edited(bpe(), "model", dropout=None, continuing_subword_prefix="", fuse_unk=False, ignore_merges=False),
    "older merges": edited(bpe(), "model", merges=["h e", "l l", "he ll", "Ġ t"]),
    "offsets": edited(bpe(), "pre_tokenizer", "pretokenizers", 1, trim_offsets=False),
    "no post-processor": edited(bpe(), post_processor=None),
    "another decoder": edited(bpe(), decoder=None),
    "limits": edited(
        bpe(), truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    ),
    "how a special token matches": edited(bpe(), "added_tokens", 1, lstrip=True, normalized=True),
    "an id that the library does not take": edited(bpe(), "added_tokens", 0, id=262),
    "a sequence of one normalizer": edited(bpe(), normalizer=sequence("normalizers", {"type": "NFC"})),
    "a sequence of a sequence": edited(
        bpe(), pre_tokenizer=sequence("pretokenizers", sequence("pretokenizers", SPLIT), BYTES)
    ),
    "an empty sequence within one": edited(
        bpe(), normalizer=sequence("normalizers", sequence("normalizers"), {"type": "NFC"})
    ),
    "sequences that do not encode": edited(
        bpe(), decoder=sequence("decoders", BYTES), post_processor=sequence("processors")
    ),
    "order": dict(reversed(bpe().items())),
    "no type": without(bpe(), "type"),
}
CHANGED = {
    "the pattern": edited(bpe(), "pre_tokenizer", "pretokenizers", 0, pattern={"Regex": r"\p{N}| ?\p{L}+|\s+|."}),
    "words begin with a space": edited(bpe(), "pre_tokenizer", "pretokenizers", 1, add_prefix_space=True),
    "the normalizer": edited(bpe(), normalizer={"type": "NFD"}),
    "no normalizer": edited(bpe(), normalizer=None),
    "a merge less": edited(bpe(), "model", merges=[("h", "e"), ("l", "l"), ("he", "ll")]),
    "the order of merges": edited(bpe(), "model", merges=[("l", "l"), ("h", "e"), ("he", "ll"), ("Ġ", "t")]),
    "whole words": edited(bpe(), "model", ignore_merges=True),
    "an added token's space": edited(bpe(), "added_tokens", 0, rstrip=True),
    "an added token made special": edited(bpe(), "added_tokens", 0, special=True),
    "ids": edited(bpe(), "model", "vocab", **{"a": bpe()["model"]["vocab"]["b"], "b": bpe()["model"]["vocab"]["a"]}),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_the_same_tokenizer_written_otherwise(name: str, tmp_path: Path) -> None:
    one, other = opened(tmp_path / "a", bpe()), opened(tmp_path / "b", REWRITTEN[name])
    assert one.fingerprint == other.fingerprint and ids(one) == ids(other)


def test_a_unigram_model_written_otherwise(tmp_path: Path) -> None:
    """The library's JSON reader changes the last bit of -3.7314250918653786."""
    pieces = [*unigram()["model"]["vocab"][:-1], ["▁hell", -3.7314250918653786]]
    one = opened(tmp_path / "a", edited(unigram(), "model", vocab=pieces))
    one._rust.save(str(tmp_path / "saved.json"))
    saved = json.loads((tmp_path / "saved.json").read_text())
    assert saved["model"]["vocab"] != pieces
    for written in (saved, without(edited(unigram(), "model", vocab=pieces), "byte_fallback")):
        other = opened(tmp_path / "b", written)
        assert one.fingerprint == other.fingerprint and ids(one) == ids(other)
    for changed in ({"unk_id": 1}, {"vocab": [*pieces[:-1], ["▁hell", -3.7314]]}):
        other = opened(tmp_path / "b", edited(unigram(), "model", **({"vocab": pieces} | changed)))
        assert one.fingerprint != other.fingerprint


@pytest.mark.parametrize("score", [-3.7314250918653786, -1e-5, -123456.78901234567, 1e22])
def test_the_last_bit_of_a_score_is_as_the_library_reads_it(score: float, tmp_path: Path) -> None:
    """The library rereads its own output identically; a computation in double precision sees a smaller change."""
    rng = np.random.default_rng(5)
    scores = [score, *(score * rng.uniform(0.1, 1, 2000)).tolist()]
    pieces = [["<unk>", 0], ["▁", -2], *([f"p{number}", each] for number, each in enumerate(scores))]
    one = opened(tmp_path / "a", edited(unigram(), "model", vocab=pieces))
    one._rust.save(str(tmp_path / "saved.json"))
    saved = json.loads((tmp_path / "saved.json").read_text())
    assert dict(saved["model"]["vocab"]) == {piece: _as_read(float(given)) for piece, given in pieces}
    assert opened(tmp_path / "b", saved).fingerprint == one.fingerprint
    pieces[2][1] = score * (1 + 1e-12)
    assert opened(tmp_path / "c", edited(unigram(), "model", vocab=pieces)).fingerprint != one.fingerprint


def test_a_score_below_single_precision_decides_ids(tmp_path: Path) -> None:
    """Two ways to split a word have scores that differ by less than single precision resolves."""
    made = []
    for number, score in enumerate((-6 * (1 - 1e-10), -6 * (1 + 1e-10))):
        pieces = [["<unk>", 0], ["▁", -2.0], ["a", -3.0], ["b", -3.0], ["ab", score]]
        made.append(opened(tmp_path / str(number), edited(unigram(), "model", vocab=pieces)))
    one, other = made
    assert one.tokenize("ab") != other.tokenize("ab") and one.fingerprint != other.fingerprint


def test_small_scores_of_a_file_written_again_and_again(tmp_path: Path) -> None:
    """The library changes the last bits of these each time."""
    content = edited(unigram(), "model", vocab=[["<unk>", 0.0], ["a", -1.0], ["b", -1.2345678901234567e-9]])
    first = opened(tmp_path / "a", content)
    for _ in range(3):
        again = opened(tmp_path / "b", content)
        assert again.fingerprint == first.fingerprint
        content = json.loads(again._rust.to_str())


@pytest.mark.parametrize(("name", "part"), [("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")])
def test_an_empty_sequence_is_none(name: str, part: str, tmp_path: Path) -> None:
    one = opened(tmp_path / "a", {**bpe(), name: None})
    other = opened(tmp_path / "b", {**bpe(), name: sequence(part)})
    assert one.fingerprint == other.fingerprint and ids(one) == ids(other)


def test_the_file_of_gpt2_with_sequences_of_one(tmp_path: Path) -> None:
    words = {**BYTES, "use_regex": True}
    plain = {**bpe(), "added_tokens": [], "normalizer": None, "pre_tokenizer": words}
    other = {**plain, "normalizer": sequence("normalizers"), "pre_tokenizer": sequence("pretokenizers", words)}
    one, two = opened(tmp_path / "a", plain, eos_token=None), opened(tmp_path / "b", other, eos_token=None)
    assert one.fingerprint == two.fingerprint == BPE(plain["model"]["vocab"], plain["model"]["merges"]).fingerprint()
    assert ids(one) == ids(two)


def test_a_unigram_model_without_a_type(tmp_path: Path) -> None:
    one, other = opened(tmp_path / "a", unigram()), opened(tmp_path / "b", without(unigram(), "type"))
    assert one.fingerprint == other.fingerprint and ids(one) == ids(other)


def test_the_pass_of_the_end_of_document_is_ours(tmp_path: Path) -> None:
    """The run always looks for it in the raw text, whatever the file says."""
    end = {"special": True, "normalized": True}
    one = opened(tmp_path / "a", added((260, "<|im", {}), LAST))
    other = opened(tmp_path / "b", added((260, "<|im", {}), (262, LAST[1], end)))
    assert ids(one) == ids(other) and one.fingerprint == other.fingerprint


def test_the_type_that_the_file_of_gpt2_leaves_out(tmp_path: Path) -> None:
    """The type does not matter: both equal GPT2BPETokenizer. Data of earlier releases has another hash."""
    plain = {**bpe(), "added_tokens": [], "normalizer": None, "pre_tokenizer": {**BYTES, "use_regex": True}}
    bare, model = without(plain, "type"), plain["model"]
    typed, untyped = opened(tmp_path / "a", plain, eos_token=None), opened(tmp_path / "b", bare, eos_token=None)
    assert typed.fingerprint == untyped.fingerprint == BPE(model["vocab"], model["merges"]).fingerprint()
    assert ids(typed) == ids(untyped)
    check(untyped, earlier_fingerprint(bare, None))


@pytest.mark.parametrize("name", CHANGED)
def test_another_tokenizer(name: str, tmp_path: Path) -> None:
    one, other = opened(tmp_path / "a", bpe()), opened(tmp_path / "b", CHANGED[name])
    assert not set(one.fingerprints) & set(other.fingerprints)


def check(tokenizer: HuggingFaceTokenizer, recorded: str) -> None:
    """Checks data with this record, as training does."""
    record = DataRecord(
        tokenizer_fingerprint=recorded, vocab_size=262, eod_id=261, dtype="uint16", documents=1, sequences=1, tokens=1,
        max_id=5, index_fingerprint="", source=(),
    )  # fmt: skip
    check_tokenizer(
        record, "data", tokenizer_fingerprint=tokenizer.fingerprints, vocab_size=tokenizer.vocab_size, eod_id=261
    )


def test_data_of_earlier_releases_is_data_of_its_tokenizer(tmp_path: Path) -> None:
    """Their records have a hash over more of the file."""
    tokenizer = opened(tmp_path / "a", bpe())
    assert tokenizer.fingerprints[1] == "fb4b86234dce9ed39b07373a4e40d2065a73a9b6b0452b26be74dec5b7e256f6"
    for recorded in tokenizer.fingerprints:
        check(tokenizer, recorded)
        with pytest.raises(DataError, match="data: made with another tokenizer"):
            check(opened(tmp_path / "b", CHANGED["no normalizer"]), recorded)


def added(*tokens: tuple[int, str, dict[str, bool]]) -> dict[str, Any]:
    listed = [{**TOKEN, "id": number, "content": text, "special": False, **flags} for number, text, flags in tokens]
    return {**bpe(), "added_tokens": listed}


LAST = (262, "<|im_end|>", {"special": True})
PLAIN, STRIPS = (260, "<a>", {}), (260, "<a>", {"lstrip": True})
PART = (260, "<t", {})


def special(normalized: bool) -> tuple[int, str, dict[str, bool]]:
    return 261, "<t>", {"special": True, "normalized": normalized}


PAIRS = {
    # The library numbers added tokens in the file's order, whatever ids the file has.
    "the order of added tokens": (added(PLAIN, (261, "<b>", {}), LAST), added((261, "<b>", {}), PLAIN, LAST)),
    "ids given twice": (added(PLAIN, (260, "<b>", {}), LAST), added((260, "<b>", {}), PLAIN, LAST)),
    "a token listed twice": (added(PLAIN, STRIPS, LAST), added(STRIPS, PLAIN, LAST)),
    # A special token is text, and hides what it overlaps from the ordinary ones of its pass.
    "which pass a special token is in": tuple(added(PART, special(late), LAST) for late in (False, True)),
    "which pass hides an ordinary token": tuple(
        added((260, "<T", {"normalized": True}), special(late), LAST) | {"normalizer": {"type": "Lowercase"}}
        for late in (False, True)
    ),
    "which pass hides another special token": tuple(
        added((259, "t>", {}), special(False), (262, "x <", {"special": True, "normalized": late}), LAST)
        for late in (False, True)
    ),
    "merges of a model that has none": (
        edited(bpe(), "model", type="WordLevel", unk_token="a"),
        edited(bpe(), "model", unk_token="a"),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_two_files_that_differ_where_the_library_decides(name: str, tmp_path: Path) -> None:
    one, other = (opened(tmp_path / str(n), content) for n, content in enumerate(PAIRS[name]))
    texts = ("x <a> <b> hell", "he", "x <t>", "<t>")
    assert [one.tokenize(text) for text in texts] != [other.tokenize(text) for text in texts]
    assert not set(one.fingerprints) & set(other.fingerprints)


def test_ids_in_the_file_that_the_library_does_not_take(tmp_path: Path) -> None:
    one = opened(tmp_path / "a", added((260, "<a>", {}), (261, "<b>", {}), LAST))
    other = opened(tmp_path / "b", added((5, "<a>", {}), (300, "<b>", {}), (301, "<|im_end|>", {"special": True})))
    assert one.tokenize("x <a> <b>") == other.tokenize("x <a> <b>") and one.fingerprint == other.fingerprint
