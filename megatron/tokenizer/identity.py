"""Which tokenizer a tokenizer.json describes, however it is written.

Programs that load a tokenizer and save it again write defaults out, spell them otherwise, and keep what decodes in
another form. The ids of documents are the same, so the fingerprint is, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from megatron.tokenizer.base import package
from megatron.tokenizer.bpe_files import merge_pair

_MATCHING = ("single_word", "lstrip", "rstrip", "normalized")


def fingerprint(description: dict[str, Any], eod_token: str | None, id_of: Callable[[str], int | None]) -> str:
    """sha256 over what decides the ids of documents. Decoder, post-processor (no token is added to a document) and how
    special tokens match (their text is text) do not. `id_of`: of an added token, as the library numbers it; it takes
    no notice of the ids in the file."""
    splitting = _written_by_library(description)
    identity = {
        "kind": "tokenizer.json",
        "model": _model(description.get("model") or {}),
        "normalizer": splitting.get("normalizer"),
        "pre_tokenizer": _without_offsets(splitting.get("pre_tokenizer")),
        "added": _all_added(description.get("added_tokens") or (), eod_token, id_of),
        "eod": eod_token,
    }
    return _hash(identity)


def earlier_fingerprint(description: dict[str, Any], eod_token: str | None) -> str:
    """As releases before this module recorded it beside data: over all of the file but its version and limits."""
    content = {name: value for name, value in description.items() if name not in ("version", "truncation", "padding")}
    model = dict(content.get("model") or {})
    if "merges" in model:
        model["merges"] = [merge_pair(merge) for merge in model["merges"]]
    return _hash({**content, "model": model, "eod": eod_token})


def _hash(identity: dict[str, Any]) -> str:
    canonical = json.dumps(identity, ensure_ascii=True, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def _written_by_library(description: dict[str, Any]) -> dict[str, Any]:
    """Normalizer and pre-tokenizer with their defaults and in today's spelling, without loading the vocabulary."""
    empty = {**description, "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    rust = package("tokenizers", "HuggingFaceTokenizer").Tokenizer.from_str(
        json.dumps({**empty, "post_processor": None, "decoder": None, "truncation": None, "padding": None})
    )
    written: dict[str, Any] = json.loads(rust.to_str())
    return written


def _model(model: dict[str, Any]) -> dict[str, Any]:
    made = dict(model)
    if "merges" in made and made.setdefault("type", "BPE") == "BPE":  # GPT-2's file on the hub does not say so
        made["merges"] = [merge_pair(merge) for merge in made["merges"]]
        # every default of this type is false, nothing or no text
        return {name: value for name, value in made.items() if value or name in ("vocab", "merges")}
    if made.get("type") == "Unigram":
        made["vocab"] = [(piece, _rounded(score)) for piece, score in made["vocab"]]
    return {name: value for name, value in made.items() if value is not None and value is not False}


def _rounded(score: float) -> float:
    """As fp32: the library's reader of JSON changes the last bit of some doubles."""
    return float(np.float32(score))


def _without_offsets(part: Any) -> Any:
    """The pre-tokenizer without what only moves offsets, and without sequences of one."""
    if isinstance(part, list):
        return [_without_offsets(each) for each in part]
    if not isinstance(part, dict):
        return part
    parts = part.get("pretokenizers")
    if isinstance(parts, list) and len(parts) == 1:
        return _without_offsets(parts[0])
    return {name: _without_offsets(value) for name, value in part.items() if name != "trim_offsets"}


def _all_added(
    tokens: Iterable[dict[str, Any]], eod_token: str | None, id_of: Callable[[str], int | None]
) -> list[list[Any]]:
    """By their ids. Of one token that is listed twice the later one counts, so those stay in the file's order."""
    numbered = [(token["id"] if (found := id_of(token["content"])) is None else found, token) for token in tokens]
    return [_added(number, token, eod_token) for number, token in sorted(numbered, key=lambda each: each[0])]


def _added(number: int, token: dict[str, Any], eod_token: str | None) -> list[Any]:
    special = bool(token.get("special")) or token["content"] == eod_token
    return [number, token["content"], special, *([] if special else [bool(token.get(n)) for n in _MATCHING])]
