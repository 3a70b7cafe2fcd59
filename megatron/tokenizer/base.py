"""What every tokenizer offers, and nothing about how it works."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron.errors import ConfigError, DataError

Ids = npt.NDArray[np.int32]

END_OF_TEXT = "<|endoftext|>"


class EncoderDifference(DataError):
    """The fast encoder gave other ids than the exact one: nothing it has written can be trusted."""

    def __init__(self, index: int, excerpt: str) -> None:
        self.index = index  # of the text, in the batch that was given
        self.excerpt = excerpt
        super().__init__(
            f"the fast encoder differs from the exact one at {excerpt!r}; run again with --encoder exact "
            "(and please report that text)"
        )

    def __reduce__(self) -> tuple[type[EncoderDifference], tuple[int, str]]:
        return EncoderDifference, (self.index, self.excerpt)


class Tokenizer(abc.ABC):
    """Text to ids and back.

    Text that looks like a special token is text: no input string can produce the end-of-document id. That id is
    only ever added explicitly (`--append-eod`). Nothing else is put around a text, but for the <s> of Llama2Tokenizer.
    """

    name: str  # Megatron's name of the type, for messages and records

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """One more than the largest id, before any padding."""

    @property
    @abc.abstractmethod
    def eod_id(self) -> int | None:
        """The end-of-document id, or None if this vocabulary has none."""

    @property
    def eod(self) -> int:
        """The end-of-document id; refused by name when the vocabulary has none."""
        if self.eod_id is None:
            raise ConfigError(f"{self.name}: {self._why_no_eod()}")
        return self.eod_id

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name, special ones included; None where the vocabulary has no such token."""
        return None

    def _why_no_eod(self) -> str:
        return "this vocabulary has no end-of-document token"

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """sha256 over what decides the ids; the same for the same tokenizer in another folder or formatting."""

    @abc.abstractmethod
    def tokenize(self, text: str) -> list[int]: ...

    @abc.abstractmethod
    def detokenize(self, ids: Iterable[int]) -> str: ...

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """One array per text; engines that are faster on many texts at once override this."""
        return [np.array(self.tokenize(text), dtype=np.int32) for text in texts]

    @property
    def engine(self) -> str:
        """What encodes batches, for summaries."""
        return "exact"

    @abc.abstractmethod
    def files(self) -> dict[str, Path]:
        """File name -> source file: what to keep beside a checkpoint so that the run can be continued anywhere."""

    @abc.abstractmethod
    def save_pretrained(self, directory: str | Path, *, model_max_length: int | None = None) -> None:
        """Write a folder that `transformers.AutoTokenizer.from_pretrained` opens offline."""


def refuse_surrogates(text: str) -> None:
    """Half a UTF-16 pair is no character; no engine can encode it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"text holds a lone surrogate (U+{ord(text[error.start]):04X} at character {error.start}); "
            "it is not Unicode text"
        ) from None
