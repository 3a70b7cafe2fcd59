"""GPT2BPETokenizer: byte-level BPE from vocab.json and merges.txt, with GPT-2's pre-tokenization, no prefix space."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron.errors import ConfigError
from megatron.tokenizer.base import (
    END_OF_TEXT,
    Encoder,
    Ids,
    Tokenizer,
    TokenizerOptions,
    gives_up,
    library_errors,
    refuse_surrogates,
)
from megatron.tokenizer.bpe_files import BPE, read_bpe
from megatron.tokenizer.byte_lengths import Lengths, of_alphabet
from megatron.tokenizer.export import tokenizer_json, write_gpt2_folder
from megatron.tokenizer.fast.guard import build_guarded
from megatron.tokenizer.fast.words import WORD_OR_LINE_END, split_at_words

# Longer texts are encoded in parts, which bounds the working memory.
PART_CHARACTERS = 1 << 20


class GPT2BPETokenizer(Tokenizer):
    name = "GPT2BPETokenizer"

    def __init__(
        self, vocab_file: str | Path, merge_file: str | Path, *, encoder: Encoder = "exact", announce: bool = True
    ) -> None:
        self._vocab_file, self._merge_file = Path(vocab_file), Path(merge_file)
        self._bpe = read_bpe(self._vocab_file, self._merge_file)
        self._rust = _built(self._bpe)
        self.vocab_size, self.eod_id = self._bpe.vocab_size, self._bpe.eod_id
        self._fast = build_guarded(
            self.name,
            lambda: tokenizer_json(self._bpe),
            self._encode_exactly,
            encoder=encoder,
            eod_token=END_OF_TEXT,
            announce=announce,
        )
        self.engine = "exact" if self._fast is None else "fast, guarded"

    @classmethod
    def from_settings(cls, config: TokenizerOptions, *, encoder: Encoder, announce: bool) -> "GPT2BPETokenizer":
        return cls(config.vocab_file or "", config.merge_file or "", encoder=encoder, announce=announce)

    def token_id(self, token: str) -> int | None:
        return self._bpe.vocab.get(token)

    def _why_no_eod(self) -> str:
        return f"--vocab-file {self._vocab_file} has no {END_OF_TEXT}; add it with a new id"

    @cached_property
    def fingerprint(self) -> str:
        return self._bpe.fingerprint()

    def tokenize(self, text: str) -> list[int]:
        refuse_surrogates(text)
        # Encoding one text at a time starts no threads, which would not survive a later fork.
        with library_errors(gives_up(self.name)):
            return self._rust.encode(text, add_special_tokens=False).ids

    def tokenize_special(self, text: str) -> list[int]:
        if self.eod_id is None:
            return self.tokenize(text)
        first, *others = (self.tokenize(part) for part in text.split(END_OF_TEXT))
        return [*first, *(index for part in others for index in (self.eod_id, *part))]

    def detokenize(self, ids: Iterable[int]) -> str:
        with library_errors(gives_up(self.name, "ids")):
            return self._rust.decode(list(ids), skip_special_tokens=False)

    def byte_lengths(self) -> Lengths:
        lengths = of_alphabet(self._bpe.vocab, self.vocab_size)
        if self.eod_id is not None:
            lengths[self.eod_id] = 0
        return lengths

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        if self._fast is not None:
            return self._fast.encode_batch(texts)
        if all(len(text) <= PART_CHARACTERS for text in texts):
            with library_errors(gives_up(self.name)):
                found = self._rust.encode_batch_fast(texts, add_special_tokens=False)
            return [np.array(encoding.ids, dtype=np.int32) for encoding in found]
        return [self._encode_exactly(text) for text in texts]

    def _encode_exactly(self, text: str) -> Ids:
        if len(text) <= PART_CHARACTERS:
            return np.array(self.tokenize(text), dtype=np.int32)
        parts = split_at_words(text, PART_CHARACTERS, WORD_OR_LINE_END)
        return np.concatenate([np.array(self.tokenize(part), dtype=np.int32) for part in parts])

    def files(self) -> dict[str, Path]:
        return {"vocab.json": self._vocab_file, "merges.txt": self._merge_file}

    def save_pretrained(self, directory: str | Path, *, model_max_length: int | None = None) -> None:
        write_gpt2_folder(Path(directory), self._bpe, model_max_length)


def _built(bpe: BPE) -> Any:
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import decoders, models, pre_tokenizers

    with library_errors(
        lambda reason: ConfigError(
            f"--vocab-file, --merge-file: the tokenizers package cannot load them ({reason}); give both files of one "
            "tokenizer"
        )
    ):
        rust = RustTokenizer(models.BPE(vocab=bpe.vocab, merges=bpe.merges))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    return rust
