"""Interface of all tokenizers, and their settings."""

import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union

import numpy as np
import numpy.typing as npt

from megatron.errors import ConfigError, DataError, MegatronError
from megatron.tokenizer.byte_lengths import Lengths

if TYPE_CHECKING:
    from megatron.config import TokenizerConfig

Ids = npt.NDArray[np.int32]

Encoder = Literal["auto", "fast", "exact"]
"""auto: the fast encoder if its ids are exact, else the exact one; fast: the fast one, or an error; exact: never the
fast one."""

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """Settings of a tokenizer as plain values, for tools and worker processes."""

    tokenizer_type: str | None = None
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    tiktoken_pattern: str | None = None
    tiktoken_num_special_tokens: int = 1000
    tiktoken_special_tokens: tuple[str, ...] | None = None
    null_tokenizer_eod_id: int | None = None
    encoder: Encoder = "auto"


TokenizerOptions = Union["TokenizerConfig", TokenizerSettings]  # a training run's section, or plain settings


class EncoderDifference(DataError):
    """Raised if ids of the fast encoder differ from the exact ones. No output of the fast one is then reliable."""

    def __init__(self, index: int, excerpt: str) -> None:
        self.index = index  # of the text in the batch
        self.excerpt = excerpt
        super().__init__(
            f"the fast encoder's ids differ from the exact ones for the text {excerpt!r}; run again with "
            "--encoder exact (and please report this text)"
        )

    def __reduce__(self) -> "tuple[type[EncoderDifference], tuple[int, str]]":
        return EncoderDifference, (self.index, self.excerpt)


class Tokenizer(abc.ABC):
    """Converts text to ids and back.

    Text that looks like a special token is plain text. No input string gives the end-of-document id; only
    `--append-eod` adds it. No other token is added to a text, except the <s> of Llama2Tokenizer.
    """

    name: str  # Megatron's name of the type, for messages and records
    engine = "exact"  # name of the encoder that `encode_batch` uses, for summaries
    vocab_size: int
    """Largest id plus one, before padding."""
    eod_id: int | None
    """End-of-document id, or None if the vocabulary has none."""

    @classmethod
    @abc.abstractmethod
    def from_settings(cls, config: TokenizerOptions, *, encoder: Encoder, announce: bool) -> "Tokenizer":
        """Opens the files that the settings name. The caller has checked that all required settings are given."""

    @property
    def eod(self) -> int:
        """End-of-document id. Raises ConfigError if the vocabulary has none."""
        if self.eod_id is None:
            raise ConfigError(f"{self.name}: {self._why_no_eod()}")
        return self.eod_id

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token, special or not; None if the vocabulary lacks it."""
        return None

    def beginning(self) -> tuple[int, ...]:
        """Ids that the tokenizer's original program (`transformers`) puts before a prompt."""
        return ()

    def _why_no_eod(self) -> str:
        return "this vocabulary has no end-of-document token"

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Hash (sha256) of everything that determines the ids, independent of the files' place and formatting."""

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Returns `fingerprint`, and the ones that earlier releases recorded for the same tokenizer."""
        return (self.fingerprint,)

    @abc.abstractmethod
    def tokenize(self, text: str) -> list[int]: ...

    def tokenize_special(self, text: str) -> list[int]:
        """Tokenizes a prompt, never a document: text that spells a special token becomes that token."""
        raise ConfigError(
            f"--prompt-with-special-tokens: {self.name} does not read special tokens in a text; use a Hugging Face "
            "folder with the model's tokenizer.json, or remove the flag"
        )

    @abc.abstractmethod
    def detokenize(self, ids: Iterable[int]) -> str: ...

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Returns one array of ids per text. Overridden by tokenizers that encode many texts faster at once."""
        return [np.array(self.tokenize(text), dtype=np.int32) for text in texts]

    def byte_lengths(self) -> Lengths | None:
        """Returns the number of text bytes of each id, [vocab_size]. Special tokens count as zero bytes. None means
        that ids do not encode text."""
        return None

    @abc.abstractmethod
    def files(self) -> dict[str, Path]:
        """Returns file name -> path of the files to store with a checkpoint, so that a run can resume anywhere."""

    @abc.abstractmethod
    def save_pretrained(self, directory: str | Path, *, model_max_length: int | None = None) -> None:
        """Writes a folder that `transformers.AutoTokenizer.from_pretrained` opens offline."""


def package(name: str, kind: str) -> Any:
    """Imports a package that only some types of tokenizer need. If it is missing, the ConfigError names the type."""
    try:
        return import_module(name)
    except ImportError:
        raise ConfigError(f"--tokenizer-type {kind}: needs the package {name}: pip install {name}") from None


@contextmanager
def library_errors(wrap: Callable[[str], Exception]) -> Iterator[None]:
    """Turns any error of a tokenizer's library into `wrap(reason)`. Libraries in Rust raise plain Exception, and after
    a panic a PanicException, which is not a subclass of Exception and cannot be imported."""
    try:
        yield
    except MegatronError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise wrap(" ".join(str(error).split())[:300]) from None


def gives_up(name: str, what: str = "a text") -> Callable[[str], DataError]:
    """Returns the `wrap` of `library_errors` for encoding and decoding with the tokenizer called `name`."""
    return lambda reason: DataError(
        f"{name}: the tokenizer's library fails on {what} ({reason}); correct or skip this input"
    )


def refuse_surrogates(text: str) -> None:
    """Rejects lone surrogates, which no engine can encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"text holds a lone surrogate (U+{ord(text[error.start]):04X} at character {error.start}), "
            "so it is not valid Unicode; remove it"
        ) from None
