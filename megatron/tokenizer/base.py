"""The interface of all tokenizers, and the settings that they are made from."""

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
"""auto: the fast encoder where it is exact; fast: an error where it is not; exact."""

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """The settings as a plain value, for tools and worker processes."""

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


TokenizerOptions = Union["TokenizerConfig", TokenizerSettings]  # the section of a training run, or these


class EncoderDifference(DataError):
    """The fast encoder's ids differ from the exact one's, so nothing it has written can be trusted."""

    def __init__(self, index: int, excerpt: str) -> None:
        self.index = index  # of the text in the batch
        self.excerpt = excerpt
        super().__init__(
            f"the fast encoder differs from the exact one at {excerpt!r}; run again with --encoder exact "
            "(and please report that text)"
        )

    def __reduce__(self) -> "tuple[type[EncoderDifference], tuple[int, str]]":
        return EncoderDifference, (self.index, self.excerpt)


class Tokenizer(abc.ABC):
    """Converts text to ids and back.

    Text that looks like a special token is text: no input string gives the end-of-document id, which is only added
    explicitly (`--append-eod`). No other token is added to a text, except the <s> of Llama2Tokenizer.
    """

    name: str  # Megatron's name of the type, for messages and records
    engine = "exact"  # what encodes batches, for summaries
    vocab_size: int
    """The largest id plus one, before padding."""
    eod_id: int | None
    """The end-of-document id, or None if this vocabulary has none."""

    @classmethod
    @abc.abstractmethod
    def from_settings(cls, config: TokenizerOptions, *, encoder: Encoder, announce: bool) -> "Tokenizer":
        """Opens the files that the settings name: all that its row of `megatron.tokenizer_types` needs are there."""

    @property
    def eod(self) -> int:
        """The end-of-document id; a ConfigError if the vocabulary has none."""
        if self.eod_id is None:
            raise ConfigError(f"{self.name}: {self._why_no_eod()}")
        return self.eod_id

    def token_id(self, token: str) -> int | None:
        """The id of a token, special ones included; None if the vocabulary lacks it."""
        return None

    def beginning(self) -> tuple[int, ...]:
        """What the tokenizer's own program puts before a prompt."""
        return ()

    def _why_no_eod(self) -> str:
        return "this vocabulary has no end-of-document token"

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """sha256 over everything that determines the ids; independent of the files' place and formatting."""

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """`fingerprint`, and what earlier releases recorded for the same tokenizer."""
        return (self.fingerprint,)

    @abc.abstractmethod
    def tokenize(self, text: str) -> list[int]: ...

    def tokenize_special(self, text: str) -> list[int]:
        """As `tokenize`, but text that spells a special token is that token: for prompts, never for documents."""
        raise ConfigError(
            f"--prompt-with-special-tokens: {self.name} does not read special tokens in a text; use a Hugging Face "
            "folder with the model's tokenizer.json, or leave the flag out"
        )

    @abc.abstractmethod
    def detokenize(self, ids: Iterable[int]) -> str: ...

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """One array of ids per text; overridden by engines that are faster on many texts."""
        return [np.array(self.tokenize(text), dtype=np.int32) for text in texts]

    def byte_lengths(self) -> Lengths | None:
        """How many bytes of text each id stands for; 0 for special tokens, which are no text. None where ids stand for
        no text at all. [vocab_size]"""
        return None

    @abc.abstractmethod
    def files(self) -> dict[str, Path]:
        """File name -> source file: the files to store with a checkpoint, so that a run can continue anywhere."""

    @abc.abstractmethod
    def save_pretrained(self, directory: str | Path, *, model_max_length: int | None = None) -> None:
        """Writes a folder that `transformers.AutoTokenizer.from_pretrained` opens offline."""


def package(name: str, kind: str) -> Any:
    """Imports a package that only some types of tokenizer need; a ConfigError names the type where it is missing."""
    try:
        return import_module(name)
    except ImportError:
        raise ConfigError(f"--tokenizer-type {kind}: needs the package {name}: pip install {name}") from None


@contextmanager
def library_errors(wrap: Callable[[str], Exception]) -> Iterator[None]:
    """Turns whatever a tokenizer's library raises into `wrap(reason)`. Libraries in Rust raise plain Exception, and
    after a panic a PanicException, which is no Exception and has no Python name."""
    try:
        yield
    except MegatronError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise wrap(" ".join(str(error).split())[:300]) from None


def gives_up(name: str, what: str = "a text") -> Callable[[str], DataError]:
    """For `library_errors`, around the calls that encode and decode with the tokenizer called `name`."""
    return lambda reason: DataError(f"{name}: its library gives up on {what} ({reason}); correct or skip it")


def refuse_surrogates(text: str) -> None:
    """Refuses lone surrogates, which no engine can encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"text holds a lone surrogate (U+{ord(text[error.start]):04X} at character {error.start}); "
            "it is not Unicode text"
        ) from None
