"""TikTokenizer: ranks of byte sequences, encoded by the package tiktoken. Nothing is downloaded.

The ranks come from Megatron's JSON (a list of rank, token_bytes, token_str) or a .tiktoken file (a line per rank).
Special tokens come first, so a token's id is its rank plus their number. </s> is the end of document.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron.errors import ConfigError, DataError
from megatron.tokenizer.base import (
    Encoder,
    Ids,
    Tokenizer,
    TokenizerOptions,
    gives_up,
    library_errors,
    package,
    refuse_surrogates,
)
from megatron.tokenizer.bpe_files import read_text
from megatron.tokenizer.byte_lengths import Lengths
from megatron.tokenizer.fast.kinds import NEMOTRON_SPLIT
from megatron.tokenizer.fast.words import split_at_words

SETTING = "--tokenizer-model"
PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": NEMOTRON_SPLIT,
}
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
NEEDED = SPECIAL_TOKENS[:3]
LARGEST_VOCABULARY = 1 << 17  # Megatron's default where --vocab-size is not given
PART_CHARACTERS = 1 << 16  # the package's regex engine fails on long texts


class TikTokenizer(Tokenizer):
    name = "TikTokenizer"

    def __init__(
        self,
        tokenizer_model: str | Path,
        *,
        pattern: str | None = None,
        vocab_size: int | None = None,
        num_special_tokens: int = 1000,
        special_tokens: Sequence[str] | None = None,
    ) -> None:
        self._path = Path(tokenizer_model)
        self._pattern = _pattern(pattern)
        self._special = _special_tokens(special_tokens or SPECIAL_TOKENS, num_special_tokens)
        tokens = _read_tokens(self._path)
        room = (vocab_size or LARGEST_VOCABULARY) - num_special_tokens
        if room < 256 or (vocab_size is not None and room > len(tokens)):
            raise ConfigError(
                f"--vocab-size {vocab_size}: with {num_special_tokens} special tokens and the {len(tokens)} tokens of "
                f"{self._path}, give {num_special_tokens + 256} to {num_special_tokens + len(tokens)}"
            )
        self._tokens = tokens[:room]
        self.vocab_size, self.eod_id = num_special_tokens + len(self._tokens), self._special.index("</s>")
        self._encoding = _encoding(self._pattern, self._tokens, self._special)

    @classmethod
    def from_settings(cls, config: TokenizerOptions, *, encoder: Encoder, announce: bool) -> "TikTokenizer":
        return cls(
            config.tokenizer_model or "",
            pattern=config.tiktoken_pattern,
            vocab_size=config.vocab_size,
            num_special_tokens=config.tiktoken_num_special_tokens,
            special_tokens=config.tiktoken_special_tokens,
        )

    def token_id(self, token: str) -> int | None:
        return self._special.index(token) if token in self._special else None

    @cached_property
    def fingerprint(self) -> str:
        content = hashlib.sha256(json.dumps([self.name, self._pattern, self._special]).encode("ascii"))
        for token in self._tokens:
            content.update(len(token).to_bytes(4, "little") + token)
        return content.hexdigest()

    def tokenize(self, text: str) -> list[int]:
        return self._encode(text).tolist()

    def tokenize_special(self, text: str) -> list[int]:
        parts = re.split(f"({'|'.join(map(re.escape, self._special))})", text)
        ids: list[int] = []
        for number, part in enumerate(parts):
            ids += [self._special.index(part)] if number % 2 else self.tokenize(part)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> Ids:
        refuse_surrogates(text)
        if len(text) <= PART_CHARACTERS:
            return self._encode_part(text)
        return np.concatenate([self._encode_part(part) for part in split_at_words(text, PART_CHARACTERS)])

    def _encode_part(self, text: str) -> Ids:
        try:
            ids = self._encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=())
        except BaseException as error:
            if type(error).__name__ != "PanicException" and not isinstance(error, ValueError):
                raise
            raise DataError(
                f"tiktoken fails on a text of {len(text)} characters that begins with {text[:40]!r}, probably because "
                "of a very long word or white space; shorten it, or skip the document"
            ) from None
        return ids.astype(np.int32)

    def detokenize(self, ids: Iterable[int]) -> str:
        with library_errors(gives_up(self.name, "ids")):
            return self._encoding.decode(list(ids), errors="replace")

    def byte_lengths(self) -> Lengths:
        return np.array([*(0 for _ in self._special), *map(len, self._tokens)], dtype=np.int32)

    def files(self) -> dict[str, Path]:
        return {self._path.name: self._path}

    def save_pretrained(self, directory: str | Path, *, model_max_length: int | None = None) -> None:
        raise ConfigError(
            f"{self.name}: transformers cannot open tiktoken ranks; convert {self._path} to a tokenizer.json, and use "
            "--tokenizer-type HuggingFaceTokenizer"
        )


def _pattern(name: str | None) -> str:
    name = name or "v2"
    if name not in PATTERNS:
        raise ConfigError(f"--tiktoken-pattern {name}: no such pattern; choose from {', '.join(PATTERNS)}")
    return PATTERNS[name]


def _special_tokens(given: Sequence[str], count: int) -> list[str]:
    flag = f"--tiktoken-special-tokens {' '.join(given)}"
    lacking = [token for token in NEEDED if token not in given]
    if lacking:
        raise ConfigError(f"{flag}: {lacking[0]} is missing; include {' '.join(NEEDED)}")
    if len(given) > count:
        raise ConfigError(
            f"--tiktoken-num-special-tokens {count}: there are {len(given)} special tokens; raise it to {len(given)}"
        )
    tokens = [*given, *(f"<SPECIAL_{number}>" for number in range(len(given), count))]
    if len(set(tokens)) != len(tokens):
        raise ConfigError(f"{flag}: a token occurs twice; give each token once")
    return tokens


def _read_tokens(path: Path) -> list[bytes]:
    """Returns the byte sequences in order of rank."""
    content = read_text(path, SETTING)
    try:
        tokens = _from_json(content) if content.lstrip().startswith("[") else _from_lines(content)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{SETTING} {path}: not a file of ranks for tiktoken ({error}); give Megatron's JSON list of rank, "
            "token_bytes and token_str, or a .tiktoken file"
        ) from None
    single = {token for token in tokens if len(token) == 1}
    if len(single) != 256 or len(set(tokens)) != len(tokens):
        problem = "a token occurs twice" if len(single) == 256 else f"{256 - len(single)} of 256 bytes are missing"
        raise ConfigError(f"{SETTING} {path}: {problem}, so the file is damaged; give the original file")
    return tokens


def _from_json(content: str) -> list[bytes]:
    entries = json.loads(content)
    if [entry["rank"] for entry in entries] != list(range(len(entries))):
        raise ValueError("ranks are not 0, 1, 2, ...")
    return [base64.b64decode(entry["token_bytes"], validate=True) for entry in entries]


def _from_lines(content: str) -> list[bytes]:
    lines = [line.split() for line in content.splitlines() if line.strip()]
    if not lines or [int(rank) for _, rank in lines] != list(range(len(lines))):
        raise ValueError("ranks are not 0, 1, 2, ...")
    return [base64.b64decode(token, validate=True) for token, _ in lines]


def _encoding(pattern: str, tokens: list[bytes], special: list[str]) -> Any:
    made = package("tiktoken", TikTokenizer.name)
    with library_errors(
        lambda reason: ConfigError(f"{SETTING}: tiktoken rejects the ranks ({reason}); give the original file")
    ):
        return made.Encoding(
            name="megatron",
            pat_str=pattern,
            mergeable_ranks={token: len(special) + rank for rank, token in enumerate(tokens)},
            special_tokens={token: index for index, token in enumerate(special)},
        )
