"""Recognises the tokenizer.json files that the fast encoder computes exactly.

The list of kinds is fixed. Each kind was verified with every character and millions of random texts; all others use the
exact encoder. The fast library ignores unknown settings, so this module must check every setting.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megatron.tokenizer.bpe_files import Merge, merge_pair
from megatron.tokenizer.byte_alphabet import CHARACTER_OF_BYTE

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKED_LETTERS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_OTHER = r" ?[^\s\p{L}\p{N}]+"
_SPACE = r"\s+(?!\S)|\s+"

# The patterns exactly as in the files of these families. Similar patterns may differ: OpenAI's own spelling of cl100k
# has possessive quantifiers, which the exact library's engine reads differently.
GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = "|".join((_CONTRACTIONS, _LETTERS, r"\p{N}{1,3}", _OTHER + r"[\r\n]*", r"\s*[\r\n]+", _SPACE))
CL100K_SPLIT = "|".join((_CONTRACTIONS, _LETTERS, r"\p{N}{1,3}", _OTHER + r"[\r\n]*", r"\s*[\r\n]", _SPACE))
QWEN2_SPLIT = "|".join((_CONTRACTIONS, _LETTERS, r"\p{N}", _OTHER + r"[\r\n]*", r"\s*[\r\n]+", _SPACE))
QWEN35_SPLIT = "|".join(
    (_CONTRACTIONS, _MARKED_LETTERS, r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r"\s*[\r\n]+", _SPACE)
)
O200K_SPLIT = "|".join(
    (*(part + _CONTRACTIONS + "?" for part in _CASED), r"\p{N}{1,3}", _OTHER + r"[\r\n/]*", r"\s*[\r\n]+", _SPACE)
)
NEMOTRON_SPLIT = "|".join((*_CASED, r"\p{N}", _OTHER + r"[\r\n/]*", r"\s*[\r\n]+", _SPACE))
CASED_SPLITS = (O200K_SPLIT, NEMOTRON_SPLIT)
KNOWN_SPLITS = (GPT2_SPLIT, LLAMA3_SPLIT, CL100K_SPLIT, QWEN2_SPLIT, QWEN35_SPLIT, *CASED_SPLITS)
_IN_ALPHABET = re.compile("[" + re.escape("".join(CHARACTER_OF_BYTE)) + "]+").fullmatch


class NotFastError(Exception):
    """Raised if the fast encoder cannot be used. Its text follows a colon in messages."""


@dataclass(frozen=True)
class FastKind:
    description: dict[str, Any]  # for the fast library, without settings that it would ignore
    composes: bool  # the exact encoder normalises text to form C first
    cased: bool  # the pre-tokenization pattern depends on case
    plain_tokens: tuple[str, ...]  # added tokens that match text


def fast_kind(description: dict[str, Any], eod_token: str | None) -> FastKind:
    """Returns the kind of a parsed tokenizer.json. Raises NotFastError if it is not on the list."""
    model = description.get("model") or {}
    _check_model(model)
    vocab = {token: index for token, index in model["vocab"].items() if _IN_ALPHABET(token)}
    merges = [merge_pair(merge) for merge in model.get("merges") or ()]
    # Text is bytes in this alphabet, so tokens outside it, and merges of them, never occur.
    merges = [merge for merge in merges if merge[0] in vocab and merge[1] in vocab]
    _check_merges(vocab, merges)
    pre_tokenizer = _pre_tokenizer(description.get("pre_tokenizer"))
    composes = _composes(description.get("normalizer"))
    given: dict[str, Any] = {
        "added_tokens": [],
        "normalizer": {"type": "NFC"} if composes else None,
        "pre_tokenizer": pre_tokenizer,
        "model": {
            "type": "BPE",
            "byte_fallback": False,
            "ignore_merges": bool(model.get("ignore_merges")),
            "vocab": vocab,
            "merges": merges,
        },
    }
    plain = _plain_tokens(description.get("added_tokens") or (), eod_token)
    cased = any(split["pattern"]["Regex"] in CASED_SPLITS for split in pre_tokenizer.get("pretokenizers", ()))
    return FastKind(given, composes, cased, plain)


def _check_model(model: dict[str, Any]) -> None:
    kind = model.get("type", "BPE")
    if kind != "BPE":
        raise NotFastError(f"its model is {kind}, not a byte-level BPE")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(option):
            raise NotFastError(f"its model has {option} {model[option]!r}")
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or not all(character in vocab for character in CHARACTER_OF_BYTE):
        raise NotFastError("its vocabulary does not have all 256 bytes")


def _check_merges(vocab: dict[str, int], merges: list[Merge]) -> None:
    """Rejects merges whose order depends on the implementation."""
    if len(set(merges)) != len(merges):
        raise NotFastError("its list of merges contains a merge twice")
    made = [vocab.get(left + right, -1) for left, right in merges]
    if -1 in made:
        raise NotFastError("a merge produces a token that the vocabulary lacks")
    if any(one == other for one, other in pairwise(made)):
        raise NotFastError("two merges produce the same token")


def _composes(normalizer: dict[str, Any] | None) -> bool:
    if normalizer is None:
        return False
    if normalizer.get("type") == "Sequence":
        kinds = {_composes(part) for part in normalizer.get("normalizers") or ()}  # each is checked
        return True in kinds
    if normalizer.get("type") == "NFC":
        return True
    raise NotFastError(f"its normalizer is {normalizer.get('type')}")


def _pre_tokenizer(pre: dict[str, Any] | None) -> dict[str, Any]:
    if pre is None:
        raise NotFastError("the tokenizer has no pre-tokenizer")
    parts: list[dict[str, Any]] = list(pre.get("pretokenizers") or ()) if pre.get("type") == "Sequence" else [pre]
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True):
        return {"type": "ByteLevel", "add_prefix_space": bool(parts[0].get("add_prefix_space", True))}
    if kinds != ["Split", "ByteLevel"]:
        raise NotFastError(f"its pre-tokenizer is {' and '.join(map(str, kinds))}")
    split, bytes_of = parts
    pattern = (split.get("pattern") or {}).get("Regex")
    # Every known pattern matches every character, so splitting at matches and keeping them is the same.
    cuts = (str(split.get("behavior")).lower(), bool(split.get("invert"))) in (("isolated", False), ("removed", True))
    if pattern not in KNOWN_SPLITS or not cuts:
        raise NotFastError(f"its pre-tokenization pattern is unknown ({str(pattern)[:40]}...)")
    if bytes_of.get("use_regex", True) or bytes_of.get("add_prefix_space", True):
        raise NotFastError("its pre-tokenizer splits words twice, or adds a space before each")
    return {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": pattern}}]}


def _plain_tokens(added: Iterable[dict[str, Any]], eod_token: str | None) -> tuple[str, ...]:
    contents = [str(token["content"]) for token in added if not token.get("special")]
    plain = tuple(content for content in contents if content != eod_token)
    for content in plain:
        if not content.strip():
            raise NotFastError(f"its added token {content!r} occurs in nearly every text")
    return plain
