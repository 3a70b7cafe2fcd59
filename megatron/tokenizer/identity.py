"""Fingerprint of the tokenizer in a tokenizer.json, independent of how the file is written.

Programs that load a tokenizer and save it again write defaults explicitly or differently, and change the form of the
decoder. The ids of documents stay the same, so the fingerprint must, too.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from megatron.tokenizer.base import package
from megatron.tokenizer.bpe_files import hash_of, merge_pair

_MATCHING = ("single_word", "lstrip", "rstrip", "normalized")


def fingerprint(description: dict[str, Any], eod_token: str | None, id_of: Callable[[str], int | None]) -> str:
    """Returns the sha256 of all that determines the ids of documents. Decoder and post-processor do not.
    `id_of` gives the library's id of an added token, which may differ from the file's."""
    splitting = _splitting(description)
    written = json.loads(splitting.to_str())
    normalize = splitting.normalizer.normalize_str if splitting.normalizer else str
    pre_tokenizer = [
        {name: value for name, value in step.items() if name != "trim_offsets"}  # affects only offsets
        for step in steps(written.get("pre_tokenizer"))
    ]
    identity = {
        "kind": "tokenizer.json",
        "model": _model(description.get("model") or {}),
        "normalizer": _joined(steps(written.get("normalizer")), "normalizers"),
        "pre_tokenizer": _joined(pre_tokenizer, "pretokenizers"),
        "added": _all_added(description.get("added_tokens") or (), eod_token, id_of, normalize),
        "eod": eod_token,
    }
    return hash_of(identity)


def steps(part: Any) -> list[Any]:
    """Returns the steps of a normalizer or pre-tokenizer in order, with nested sequences flattened."""
    if part is None or part.get("type") != "Sequence":
        return [] if part is None else [part]
    return [step for inner in part.get("normalizers") or part.get("pretokenizers") or () for step in steps(inner)]


def _joined(found: list[Any], name: str) -> Any:
    """Returns None for no steps, the step itself for one, and a sequence for more."""
    return {"type": "Sequence", name: found} if len(found) > 1 else next(iter(found), None)


def earlier_fingerprint(description: dict[str, Any], eod_token: str | None) -> str:
    """Returns the fingerprint that earlier releases recorded: a hash of the file without version and limits."""
    content = {name: value for name, value in description.items() if name not in ("version", "truncation", "padding")}
    model = dict(content.get("model") or {})
    if "merges" in model:
        model["merges"] = [merge_pair(merge) for merge in model["merges"]]
    return hash_of({**content, "model": model, "eod": eod_token})


def _splitting(description: dict[str, Any]) -> Any:
    """Makes a tokenizer with only the normalizer and the pre-tokenizer. The library then writes their defaults
    explicitly and in its current format."""
    empty = {**description, "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    return package("tokenizers", "HuggingFaceTokenizer").Tokenizer.from_str(
        json.dumps({**empty, "post_processor": None, "decoder": None, "truncation": None, "padding": None})
    )


def _model(model: dict[str, Any]) -> dict[str, Any]:
    made = dict(model)
    if "merges" in made and made.setdefault("type", "BPE") == "BPE":  # GPT-2's file on the hub has no type
        made["merges"] = [merge_pair(merge) for merge in made["merges"]]
        # every default of this type is false, null or an empty text
        return {name: value for name, value in made.items() if value or name in ("vocab", "merges")}
    if isinstance(made.get("vocab"), list):  # Unigram's, even in a file without a type
        made["type"] = "Unigram"
        made["vocab"] = [(piece, _as_read(float(score))) for piece, score in made["vocab"]]
    return {name: value for name, value in made.items() if value is not None and value is not False}


def _as_read(score: float) -> float:
    """Returns the score that the library computes with, in double precision. Its JSON reader divides an integer by a
    power of ten, which may change the last bit. Writing and reading the result again does not change it. Scores below
    1e-6 are rounded to single precision."""
    if abs(score) < 1e-6:
        return float(np.float32(score))
    number, _, exponent = repr(score).partition("e")
    whole, _, fraction = number.partition(".")
    places = len(fraction) - int(exponent or 0)
    power = float(f"1e{abs(places)}")
    return float(whole + fraction) / power if places > 0 else float(whole + fraction) * power


def _all_added(
    tokens: Iterable[dict[str, Any]],
    eod_token: str | None,
    id_of: Callable[[str], int | None],
    normalize: Callable[[str], str],
) -> list[list[Any]]:
    """Returns the added tokens, sorted by id. The sort is stable: if an id is listed twice, the later entry counts."""
    tokens = [
        {**token, "special": True, "normalized": False} if token["content"] == eod_token else token for token in tokens
    ]
    numbered = [(token["id"] if (found := id_of(token["content"])) is None else found, token) for token in tokens]
    hides = _hides_ordinary_tokens(tokens, normalize)
    return [_added(number, token, hides) for number, token in sorted(numbered, key=lambda each: each[0])]


def _added(number: int, token: dict[str, Any], hides: bool) -> list[Any]:
    special = bool(token.get("special"))
    names = _MATCHING if not special else ("normalized",) if hides else ()
    return [number, token["content"], special, *(bool(token.get(name)) for name in names)]


def _hides_ordinary_tokens(tokens: Sequence[dict[str, Any]], normalize: Callable[[str], str]) -> bool:
    """True if special tokens may affect where ordinary ones match. The library searches for both in one pass. A special
    token that is left as text hides the ordinary ones that it overlaps. A second pass, in the normalized text, searches
    for `normalized` tokens."""
    specials = [token["content"] for token in tokens if token.get("special")]
    plain: Callable[[str], str] = str
    for normalized, spelled in ((False, plain), (True, normalize)):
        ordinary = [
            token["content"]
            for token in tokens
            if not token.get("special") and bool(token.get("normalized")) is normalized
        ]
        if any(map(_overlapping(list(map(spelled, specials))), map(spelled, ordinary))):
            return True
    return False


def _overlapping(specials: Sequence[str]) -> Callable[[str], bool]:
    """Returns a function that is True for a token that can overlap one of `specials` in some text."""
    beginnings = {token[:size] for token in specials for size in range(1, len(token) + 1)}
    ends = {token[-size:] for token in specials for size in range(1, len(token) + 1)}

    def overlaps(token: str) -> bool:
        borders = any(token[:n] in ends or token[-n:] in beginnings for n in range(1, len(token) + 1))
        return borders or any(token in special or special in token for special in specials)

    return overlaps
