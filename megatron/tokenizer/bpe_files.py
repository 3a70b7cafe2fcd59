"""Reads vocab.json and merges.txt of a byte-level BPE and checks them against each other.

Without these checks a wrong pair of files would silently give wrong ids, and a run would train on noise.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError
from megatron.tokenizer.base import END_OF_TEXT
from megatron.tokenizer.byte_alphabet import CHARACTER_OF_BYTE, SPACE
from megatron.utils.regular_file import regular

Merge = tuple[str, str]

# A larger share of unreachable ordinary tokens means that merges.txt is truncated or of another vocabulary.
UNREACHABLE_SHARE = 0.01
# Ids may have gaps. Larger ones mean that the file is damaged, or crafted to exhaust the memory.
SPARE_IDS = 1 << 16


@dataclass(frozen=True)
class BPE:
    """Checked vocabulary, and its merges in order of rank."""

    vocab: dict[str, int]
    merges: list[Merge]

    @cached_property
    def vocab_size(self) -> int:
        return max(self.vocab.values()) + 1

    @property
    def eod_id(self) -> int | None:
        return self.vocab.get(END_OF_TEXT)

    def fingerprint(self) -> str:
        """Returns the sha256 of the canonical content, independent of the files' names, order and white space."""
        by_id = sorted(self.vocab.items(), key=lambda item: item[1])
        content = {"kind": "byte-level-bpe", "pattern": "gpt2", "vocab": by_id, "merges": self.merges}
        return hash_of(content)


def hash_of(content: Any) -> str:
    """Returns the sha256 of a JSON value in a canonical form."""
    canonical = json.dumps(content, ensure_ascii=True, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def read_bpe(vocab_file: Path, merge_file: Path) -> BPE:
    """Reads both files. Errors name the file and line that is damaged or does not fit the other file."""
    vocab = _read_vocab(vocab_file)
    merges = _read_merges(merge_file)
    check_bpe(vocab, merges, vocab_name=f"--vocab-file {vocab_file}", merges_name=f"--merge-file {merge_file}")
    return BPE(vocab, merges)


def merge_pair(merge: str | list[str]) -> Merge:
    """Parses a merge of a tokenizer.json: "a b" in older files, ["a", "b"] in newer ones."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right


def read_text(path: Path, setting: str) -> str:
    """Reads a UTF-8 file of the tokenizer. Its ConfigErrors name the setting."""
    try:
        return regular(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{setting} {path}: there is no such file; check the path") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{setting} {path}: not UTF-8 text ({error.reason} at byte {error.start}); give the original file"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{setting} {path}: cannot be read ({error.strerror}); check the path and its permissions"
        ) from None


def _read_vocab(path: Path) -> dict[str, int]:
    try:
        vocab = json.loads(read_text(path, "--vocab-file"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"--vocab-file {path}: not JSON ({error}); give the tokenizer's vocab.json "
            "(merges.txt belongs to --merge-file)"
        ) from None
    if not isinstance(vocab, dict) or not vocab or not all(type(i) is int and i >= 0 for i in vocab.values()):
        raise ConfigError(f"--vocab-file {path}: not an object of token -> id; give the tokenizer's vocab.json")
    if len(set(vocab.values())) != len(vocab):
        raise ConfigError(
            f"--vocab-file {path}: two tokens have the same id, so the file is damaged; give the original file"
        )
    check_ids(vocab, f"--vocab-file {path}")
    return vocab


def check_ids(vocab: Mapping[str, int], name: str) -> None:
    """Rejects ids far above the number of tokens: libraries and embeddings allocate a table up to the largest id."""
    if not vocab:
        raise ConfigError(f"{name}: has no tokens; give the tokenizer that the model was trained with")
    token, largest = max(vocab.items(), key=lambda item: item[1])
    if largest >= 2 * len(vocab) + SPARE_IDS:
        raise ConfigError(
            f"{name}: {token[:60]!r} has the id {largest}, but there are {len(vocab)} tokens; number the tokens from 0"
        )


def _read_merges(path: Path) -> list[Merge]:
    merges: list[Merge] = []
    for number, line in enumerate(read_text(path, "--merge-file").split("\n"), start=1):
        line = line.rstrip("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, space, right = line.partition(" ")
        if not left or not right or not space or " " in right:
            raise ConfigError(
                f"--merge-file {path}, line {number}: {line[:60]!r} is not two tokens; give the tokenizer's merges.txt"
            )
        merges.append((left, right))
    if not merges:
        raise ConfigError(f"--merge-file {path}: holds no merges; give the tokenizer's merges.txt")
    return merges


def check_bpe(vocab: dict[str, int], merges: list[Merge], *, vocab_name: str, merges_name: str) -> None:
    """Rejects a vocabulary that cannot encode every text, and merges of another vocabulary."""
    lacking = [byte for byte, character in enumerate(CHARACTER_OF_BYTE) if character not in vocab]
    if lacking:
        raise ConfigError(
            f"{vocab_name}: no token for byte {lacking[0]:#04x} ({len(lacking)} of 256 bytes have none), so some text "
            "would be dropped; give the vocab.json of a byte-level BPE"
        )
    for number, (left, right) in enumerate(merges, start=1):
        for token in (left, right, left + right):
            if token not in vocab:
                raise ConfigError(
                    f"{merges_name} does not fit {vocab_name}: merge {number} ({left} {right}) needs the token "
                    f"{token!r}, which the vocabulary lacks; give both files of one tokenizer"
                )
    reachable = {left + right for left, right in merges}
    # A token with the space's substitute character is ordinary text, so some merge must make it.
    orphans = [token for token in vocab if SPACE in token and len(token) > 1 and token not in reachable]
    if len(orphans) > UNREACHABLE_SHARE * len(vocab):
        raise ConfigError(
            f"{merges_name} does not fit {vocab_name}: no merge produces {orphans[0]!r} and {len(orphans) - 1} other "
            "tokens, so the merges are truncated or belong to another tokenizer; give both files of one tokenizer"
        )
