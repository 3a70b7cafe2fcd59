"""Reads the data of an evaluation: plain text, JSON lines, or .bin/.idx."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.data.indexed.dataset import IndexedDataset, bin_path, idx_path, without_ending
from megatron.data.indexed.record import check_files, difference_of, read_record
from megatron.errors import ConfigError, DataError
from megatron.evaluation.sequences import Tokens
from megatron.evaluation.wikitext import count_words, detokenize
from megatron.inference.texts import read_json_lines, read_nonempty_text, text_under
from megatron.tokenizer import Tokenizer

NUMBERS = "NullTokenizer"
"""The tokenizer whose ids decode to digits, which are not text."""


@dataclass(frozen=True)
class Document:
    tokens: Tokens
    words: int | None
    bytes: int | None
    """Number of bytes of its text; None if ids do not encode text."""


def is_indexed(data: Path) -> bool:
    prefix = without_ending(str(data))
    return data.suffix in (".bin", ".idx") or (
        not data.is_file() and (bin_path(prefix).exists() or idx_path(prefix).exists())
    )


def refuse_tokens(data: Path, task: str) -> None:
    """Rejects .bin/.idx data for a task that needs text."""
    if is_indexed(data):
        raise ConfigError(
            f"--task {task}: {data} holds tokens, which only --task perplexity reads; give JSON lines of texts"
        )


def read_documents(data: Path, tokenizer: Tokenizer, *, json_key: str, wikitext: bool) -> list[Document]:
    """Reads documents: a text file as one, JSON lines as one per line, .bin/.idx as stored."""
    if is_indexed(data):
        if wikitext:
            raise ConfigError(
                f"--detokenize wikitext: {data} holds tokens, not text; give text, or remove --detokenize"
            )
        return list(_indexed(without_ending(str(data)), tokenizer))
    if data.suffix in (".jsonl", ".json"):
        texts = [text_under(entry, json_key, place) for place, entry in read_json_lines(data, flag="--data")]
    else:
        texts = [read_nonempty_text(data, flag="--data")]
    return [_document(text, tokenizer, wikitext) for text in texts]


def _document(text: str, tokenizer: Tokenizer, wikitext: bool) -> Document:
    words = count_words(text) if wikitext else len(text.split())
    tokens = tokenizer.tokenize(detokenize(text) if wikitext else text)
    return Document(np.array(tokens, dtype=np.int64), words, len(text.encode("utf-8")))


def _indexed(prefix: str, tokenizer: Tokenizer) -> Iterator[Document]:
    data = IndexedDataset(prefix)
    if not data.num_tokens:
        raise DataError(f"{prefix}.bin: is empty; give data with tokens")
    record = read_record(prefix)
    if record is not None:
        check_files(record, data, data.fingerprint)
        if record.tokenizer_fingerprint not in tokenizer.fingerprints:
            raise DataError(
                f"--data {prefix}: made with another tokenizer (fingerprint {record.tokenizer_fingerprint[:12]}) than "
                f"the model's ({tokenizer.name}, fingerprint {tokenizer.fingerprint[:12]})"
                f"{difference_of(record, tokenizer)}; preprocess the text with the model's tokenizer, or evaluate the "
                "text itself"
            )
    for first, stop in zip(data.document_indices[:-1], data.document_indices[1:], strict=True):
        pieces = [data.get(sequence) for sequence in range(first, stop)]
        tokens = np.concatenate(pieces or [np.empty(0)]).astype(np.int64)
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < tokenizer.vocab_size:
            raise DataError(
                f"{prefix}.bin: holds ids from {tokens.min()} to {tokens.max()}, but the model's tokenizer "
                f"({tokenizer.name}) has {tokenizer.vocab_size} entries; give data of the same tokenizer"
            )
        if tokenizer.name == NUMBERS:
            yield Document(tokens, None, None)
            continue
        text = tokenizer.detokenize(token for token in tokens.tolist() if token != tokenizer.eod_id)
        yield Document(tokens, len(text.split()), len(text.encode("utf-8")))
