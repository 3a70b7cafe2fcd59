"""Reads what is evaluated: plain text, JSON lines, or .bin/.idx. Whatever is wrong with a file is one line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.indexed.dataset import IndexedDataset, bin_path, idx_path, without_ending
from megatron.data.indexed.record import check_files, read_record
from megatron.errors import ConfigError, DataError
from megatron.evaluation.sequences import Tokens
from megatron.evaluation.wikitext import count_words, detokenize
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.base import refuse_surrogates

NUMBERS = "NullTokenizer"
"""Its ids stand for themselves: what they decode to is no text."""


@dataclass(frozen=True)
class Document:
    tokens: Tokens
    words: int | None
    bytes: int | None
    """Of its text; None where ids stand for no text."""


def is_indexed(data: Path) -> bool:
    prefix = without_ending(str(data))
    return data.suffix in (".bin", ".idx") or (
        not data.is_file() and (bin_path(prefix).exists() or idx_path(prefix).exists())
    )


def read_documents(data: Path, tokenizer: Tokenizer, *, json_key: str, wikitext: bool) -> list[Document]:
    """A text file is one document; of JSON lines each line, and of .bin/.idx each document is one."""
    if is_indexed(data):
        if wikitext:
            raise ConfigError(f"--detokenize wikitext: {data} holds tokens, not text; give the text, or leave it out")
        return list(_indexed(without_ending(str(data)), tokenizer))
    if data.suffix in (".jsonl", ".json"):
        texts = [text_of(entry, json_key, place) for place, entry in read_json_lines(data)]
    else:
        texts = [_read(data)]
    return [_document(text, tokenizer, wikitext) for text in texts]


def _document(text: str, tokenizer: Tokenizer, wikitext: bool) -> Document:
    words = count_words(text) if wikitext else len(text.split())
    tokens = tokenizer.tokenize(detokenize(text) if wikitext else text)
    return Document(np.array(tokens, dtype=np.int64), words, len(text.encode("utf-8")))


def _read(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--data {path}: cannot be read ({error.strerror or error})") from None
    if not content.strip():
        raise DataError(f"{path}: is empty; there is nothing to evaluate")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not UTF-8 (byte 0x{content[error.start]:02x} at {error.start}); convert it (iconv)"
        ) from None


def read_json_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place for messages, object) of every line that is not blank."""
    for number, line in enumerate(_read(path).split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path} line {number}"
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise DataError(f"{place}: not JSON ({error}); the file has one object in each line") from None
        if not isinstance(entry, dict):
            raise DataError(f'{place}: a {type(entry).__name__}, not an object such as {{"text": "..."}}')
        yield place, entry


def text_of(entry: Mapping[str, Any], key: str, place: str) -> str:
    text = entry.get(key)
    if not isinstance(text, str):
        has = ", ".join(sorted(entry)[:8]) or "nothing"
        raise DataError(f"{place}: has no text under {key!r} (it has {has}); name the key with --json-key")
    try:
        refuse_surrogates(text)
    except DataError as error:
        raise DataError(f"{place}: {error}") from None
    return text


def _indexed(prefix: str, tokenizer: Tokenizer) -> Iterator[Document]:
    data = IndexedDataset(prefix)
    if not data.num_tokens:
        raise DataError(f"{prefix}.bin: is empty; there is nothing to evaluate")
    record = read_record(prefix)
    if record is not None:
        check_files(record, data, data.fingerprint)
        if record.tokenizer_fingerprint != tokenizer.fingerprint:
            raise ConfigError(
                f"--data {prefix}: was made with another tokenizer (fingerprint {record.tokenizer_fingerprint[:12]}) "
                f"than the model's ({tokenizer.name}, fingerprint {tokenizer.fingerprint[:12]}); preprocess the text "
                "with the model's, or evaluate the text itself"
            )
    for first, stop in zip(data.document_indices[:-1], data.document_indices[1:], strict=True):
        pieces = [data.get(sequence) for sequence in range(first, stop)]
        tokens = np.concatenate(pieces or [np.empty(0)]).astype(np.int64)
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < tokenizer.vocab_size:
            raise DataError(
                f"{prefix}.bin: holds ids from {tokens.min()} to {tokens.max()}, and the model's tokenizer "
                f"({tokenizer.name}) has {tokenizer.vocab_size} entries: it was made with another"
            )
        if tokenizer.name == NUMBERS:
            yield Document(tokens, None, None)
            continue
        text = tokenizer.detokenize(token for token in tokens.tolist() if token != tokenizer.eod_id)
        yield Document(tokens, len(text.split()), len(text.encode("utf-8")))
