"""NullTokenizer: the text is a list of ids. For tests and speed measurements without a vocabulary."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from megatron.errors import ConfigError, DataError
from megatron.tokenizer.base import Encoder, Tokenizer, TokenizerOptions


class NullTokenizer(Tokenizer):
    """Parses decimal ids separated by spaces. By default the end-of-document id is the vocabulary size. Text must not
    contain it."""

    name = "NullTokenizer"

    def __init__(self, vocab_size: int, eod_id: int | None = None) -> None:
        if vocab_size < 1:
            raise ConfigError(f"--vocab-size {vocab_size}: NullTokenizer needs at least 1 token; give a larger number")
        self.eod_id: int = vocab_size if eod_id is None else eod_id
        if not 0 <= self.eod_id <= vocab_size:
            raise ConfigError(
                f"--null-tokenizer-eod-id {eod_id}: not in the vocabulary of --vocab-size {vocab_size}; give 0 to "
                f"{vocab_size - 1}, or remove the flag (the default is {vocab_size})"
            )
        self.vocab_size = max(vocab_size, self.eod_id + 1)

    @classmethod
    def from_settings(cls, config: TokenizerOptions, *, encoder: Encoder, announce: bool) -> "NullTokenizer":
        return cls(config.vocab_size or 0, eod_id=config.null_tokenizer_eod_id)

    @property
    def fingerprint(self) -> str:
        inside = "" if self.eod_id == self.vocab_size - 1 else f", end of document {self.eod_id}"
        return hashlib.sha256(f"null {self.vocab_size - 1}{inside}".encode("ascii")).hexdigest()

    def tokenize(self, text: str) -> list[int]:
        ids = []
        for word in text.split():
            is_number = word.isascii() and word.isdigit() and len(word) < 20
            if not is_number or int(word) >= self.vocab_size or int(word) == self.eod_id:
                raise DataError(
                    f"NullTokenizer: {word[:30]!r} is not allowed; give ids from 0 to {self.vocab_size - 1} separated "
                    f"by spaces, without the end-of-document id {self.eod_id}"
                )
            ids.append(int(word))
        return ids

    def detokenize(self, ids: Iterable[int]) -> str:
        return " ".join(str(index) for index in ids)

    def files(self) -> dict[str, Path]:
        return {}

    def save_pretrained(self, directory: str | Path, *, model_max_length: int | None = None) -> None:
        raise ConfigError("NullTokenizer: has no files that transformers could open; export without a tokenizer")
