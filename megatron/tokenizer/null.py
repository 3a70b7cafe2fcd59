"""NullTokenizer: text that consists of ids, for tests and speed measurements without a vocabulary."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from megatron.errors import ConfigError, DataError
from megatron.tokenizer.base import Tokenizer


class NullTokenizer(Tokenizer):
    """Parses decimal ids separated by spaces. The end-of-document id follows the given vocabulary."""

    name = "NullTokenizer"

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ConfigError(f"--vocab-size {vocab_size}: NullTokenizer needs at least 1 token")
        self._ordinary = vocab_size

    @property
    def vocab_size(self) -> int:
        return self._ordinary + 1

    @property
    def eod_id(self) -> int:
        return self._ordinary

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"null {self._ordinary}".encode("ascii")).hexdigest()

    def tokenize(self, text: str) -> list[int]:
        ids = []
        for word in text.split():
            if not (word.isascii() and word.isdigit() and len(word) < 20) or int(word) >= self._ordinary:
                raise DataError(
                    f"NullTokenizer: {word[:30]!r} is not an id from 0 to {self._ordinary - 1}; its text is numbers "
                    "between spaces"
                )
            ids.append(int(word))
        return ids

    def detokenize(self, ids: Iterable[int]) -> str:
        return " ".join(str(index) for index in ids)

    def files(self) -> dict[str, Path]:
        return {}

    def save_pretrained(self, directory: str | Path, *, model_max_length: int | None = None) -> None:
        raise ConfigError("NullTokenizer: there is nothing that transformers could open; export without a tokenizer")
