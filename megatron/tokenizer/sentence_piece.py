"""SentencePieceTokenizer, GPTSentencePieceTokenizer and Llama2Tokenizer: a SentencePiece .model file.

They differ in the end-of-document token, as in Megatron. The first adds <CLS>, <SEP>, <EOD> and <MASK> after the
model's pieces; the others use the model's own </s>. Only Llama2Tokenizer adds the model's <s> before every text. Text
that looks like a control piece is plain text.
"""

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron.errors import ConfigError, DataError
from megatron.tokenizer.base import Encoder, Ids, Tokenizer, TokenizerOptions, package, refuse_surrogates
from megatron.tokenizer.byte_lengths import Lengths, by_decoding
from megatron.utils.regular_file import regular

ADDED = ("<CLS>", "<SEP>", "<EOD>", "<MASK>")


class GPTSentencePieceTokenizer(Tokenizer):
    name = "GPTSentencePieceTokenizer"

    def __init__(self, tokenizer_model: str | Path) -> None:
        self._path = Path(tokenizer_model)
        self._bytes = _read(self._path)
        self._pieces = _load(self._path, self._bytes, self.name)
        self._added: dict[str, int] = self._add_tokens()
        size = self._pieces.get_piece_size()
        self.vocab_size, self.eod_id = size + sum(index >= size for index in self._added.values()), self._find_eod_id()

    @classmethod
    def from_settings(
        cls, config: TokenizerOptions, *, encoder: Encoder, announce: bool
    ) -> "GPTSentencePieceTokenizer":
        return cls(config.tokenizer_model or "")

    def _add_tokens(self) -> dict[str, int]:
        return {}

    def _find_eod_id(self) -> int | None:
        index = self._pieces.eos_id()
        return index if index >= 0 else None

    def token_id(self, token: str) -> int | None:
        if token in self._added:
            return self._added[token]
        index = int(self._pieces.piece_to_id(token))  # an unknown piece gives the id of the unknown token
        return index if self._pieces.id_to_piece(index) == token else None

    def _why_no_eod(self) -> str:
        return (
            f"--tokenizer-model {self._path} was trained without </s> (eos_id -1), the "
            "end-of-document token; use another model"
        )

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.name.encode("ascii") + b"\0" + self._bytes).hexdigest()

    def tokenize(self, text: str) -> list[int]:
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        for text in texts:
            refuse_surrogates(text)
        # One thread, because a worker has one core and threads would not survive a later fork.
        encoded = self._pieces.encode(list(texts), out_type=int, num_threads=1)
        arrays = [np.fromiter(ids, dtype=np.int32, count=len(ids)) for ids in encoded]
        self._refuse_eod(arrays)
        return arrays

    def _refuse_eod(self, arrays: Sequence[Ids]) -> None:
        if self._text_can_be_eod and any((ids == self.eod_id).any() for ids in arrays):
            raise DataError(
                f"{self.name}: this model encodes the text {self._pieces.id_to_piece(self.eod_id)!r} to the "
                "end-of-document id; remove it from the text"
            )

    @cached_property
    def _text_can_be_eod(self) -> bool:
        """True if the end-of-document piece can match text: user-defined pieces can, control pieces cannot."""
        eod = self.eod_id
        return eod is not None and eod < self._pieces.get_piece_size() and not self._pieces.is_control(eod)

    def detokenize(self, ids: Iterable[int]) -> str:
        texts: list[str] = []
        run: list[int] = []
        special = {index: token for token, index in self._added.items()}
        for index in ids:
            if index in special:
                texts += [self._pieces.decode(run), special[index]]
                run = []
            else:
                run.append(index)
        return "".join([*texts, self._pieces.decode(run)])

    def byte_lengths(self) -> Lengths:
        """Returns byte lengths. The word mark that begins a piece counts as one byte, even at the start of a text."""
        size = self._pieces.get_piece_size()
        known = {index: 1 for index in range(size) if self._pieces.is_byte(index)}
        known |= {index: 0 for index in range(size) if self._pieces.is_control(index) or self._pieces.is_unused(index)}
        known |= dict.fromkeys(self._added.values(), 0)
        if self.eod_id is not None:
            known[self.eod_id] = 0
        return by_decoding(self.vocab_size, self._pieces.decode, int(self._pieces.encode("a")[-1]), known)

    def files(self) -> dict[str, Path]:
        return {"tokenizer.model": self._path}

    def save_pretrained(self, directory: str | Path, *, model_max_length: int | None = None) -> None:
        raise ConfigError(
            f"{self.name}: transformers cannot open a SentencePiece model directly; convert {self._path} to a "
            "tokenizer.json with transformers, and use --tokenizer-type HuggingFaceTokenizer"
        )


class Llama2Tokenizer(GPTSentencePieceTokenizer):
    """Adds <s> before every text, even an empty one, if the model has it."""

    name = "Llama2Tokenizer"

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        begin = self._pieces.bos_id()
        arrays = super().encode_batch(texts)
        return arrays if begin < 0 else [np.insert(ids, 0, begin) for ids in arrays]


class SentencePieceTokenizer(GPTSentencePieceTokenizer):
    name = "SentencePieceTokenizer"

    def _add_tokens(self) -> dict[str, int]:
        """Adds tokens in Megatron's order: ADDED, then padding, begin and end tokens that the model lacks."""
        known = {self._pieces.id_to_piece(i): i for i in range(self._pieces.get_piece_size())}
        own = {"<PAD>": self._pieces.pad_id(), "<BOS>": self._pieces.bos_id(), "<EOS>": self._pieces.eos_id()}
        added: dict[str, int] = {}
        for token in (*ADDED, *(name for name, index in own.items() if index < 0)):
            added[token] = known.setdefault(token, len(known))
        return added

    def _find_eod_id(self) -> int | None:
        return self._added["<EOD>"]


def _read(path: Path) -> bytes:
    try:
        content = regular(path).read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"--tokenizer-model {path}: there is no such file; give the path of a .model file (nothing is downloaded)"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"--tokenizer-model {path}: cannot be read ({error.strerror}); check its permissions"
        ) from None
    if not content:  # the package would accept it as a model
        raise ConfigError(f"--tokenizer-model {path}: is empty; give the tokenizer's .model file")
    return content


def _load(path: Path, content: bytes, name: str) -> Any:
    made = package("sentencepiece", name)
    try:
        return made.SentencePieceProcessor(model_proto=content)
    except (RuntimeError, ValueError, OSError):
        raise ConfigError(
            f"--tokenizer-model {path}: not a SentencePiece model; give the tokenizer's .model file "
            "(a tokenizer.json belongs to --tokenizer-type HuggingFaceTokenizer)"
        ) from None
