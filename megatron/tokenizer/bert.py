"""BertWordPieceLowerCase and BertWordPieceCase: BERT's vocab.txt, one piece per line.

Megatron's rules: a word has up to 200 characters, [BOS] and [EOS] follow the vocabulary, no end-of-document token.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron.errors import ConfigError
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
from megatron.tokenizer.bpe_files import hash_of, read_text
from megatron.tokenizer.byte_lengths import Lengths, by_decoding
from megatron.tokenizer.export import config_text, write_files

SETTING = "--vocab-file"
NEEDED = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")
ADDED = ("[BOS]", "[EOS]")
LONGEST_WORD = 200


class BertWordPieceTokenizer(Tokenizer):
    def __init__(self, vocab_file: str | Path, *, lower_case: bool) -> None:
        self.name = "BertWordPieceLowerCase" if lower_case else "BertWordPieceCase"
        self._vocab_file = Path(vocab_file)
        self._vocab = _read_vocab(self._vocab_file)
        self._rust = _build(self._vocab, lower_case, self.name)
        self.vocab_size, self.eod_id = len(self._vocab), None

    @classmethod
    def from_settings(cls, config: TokenizerOptions, *, encoder: Encoder, announce: bool) -> "BertWordPieceTokenizer":
        return cls(config.vocab_file or "", lower_case=config.tokenizer_type == "BertWordPieceLowerCase")

    def token_id(self, token: str) -> int | None:
        return self._vocab.get(token)

    def _why_no_eod(self) -> str:
        return "BERT's vocabulary has no end-of-document token; remove --append-eod, or use another tokenizer"

    @cached_property
    def fingerprint(self) -> str:
        return hash_of([self.name, LONGEST_WORD, list(self._vocab)])

    def tokenize(self, text: str) -> list[int]:
        refuse_surrogates(text)
        with library_errors(gives_up(self.name)):
            return self._rust.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        for text in texts:
            refuse_surrogates(text)
        with library_errors(gives_up(self.name)):
            encodings = self._rust.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.fromiter(encoding.ids, dtype=np.int32) for encoding in encodings]

    def detokenize(self, ids: Iterable[int]) -> str:
        with library_errors(gives_up(self.name, "ids")):
            return self._rust.decode(list(ids), skip_special_tokens=False)

    def byte_lengths(self) -> Lengths:
        """Returns lengths of the normalised text, which may lack capitals, accents and white space."""
        known = {self._vocab[token]: 0 for token in (*NEEDED[1:], *ADDED)}
        return by_decoding(self.vocab_size, self.detokenize, self.tokenize("a")[-1], known)

    def files(self) -> dict[str, Path]:
        return {"vocab.txt": self._vocab_file}

    def save_pretrained(self, directory: str | Path, *, model_max_length: int | None = None) -> None:
        roles = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **roles, "mask_token": "[MASK]"}
        texts = {
            "tokenizer.json": self._rust.to_str(pretty=True) + "\n",
            "tokenizer_config.json": config_text(config, model_max_length),
            "vocab.txt": "".join(f"{token}\n" for token in self._vocab),
        }
        write_files(Path(directory), texts)


def _read_vocab(path: Path) -> dict[str, int]:
    tokens = [line.strip() for line in read_text(path, SETTING).rstrip("\n").split("\n")]
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocab[token] != index)
        raise ConfigError(
            f"{SETTING} {path}: {twice!r} occurs twice, so the file is damaged; give BERT's original vocab.txt"
        )
    lacking = [token for token in NEEDED if token not in vocab]
    if lacking:
        raise ConfigError(f"{SETTING} {path}: has no {lacking[0]}; give BERT's vocab.txt, with one token per line")
    for token in ADDED:
        vocab.setdefault(token, len(vocab))
    return vocab


def _build(vocab: dict[str, int], lower_case: bool, name: str) -> Any:
    made = package("tokenizers", name)
    with library_errors(
        lambda reason: ConfigError(
            f"{SETTING}: the tokenizers package cannot load the vocabulary ({reason}); give BERT's vocab.txt"
        )
    ):
        rust = made.Tokenizer(made.models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD))
    rust.normalizer = made.normalizers.BertNormalizer(lowercase=lower_case, strip_accents=lower_case)
    rust.pre_tokenizer = made.pre_tokenizers.BertPreTokenizer()
    rust.decoder = made.decoders.WordPiece()
    return rust
