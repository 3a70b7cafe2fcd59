"""What a worker does with a chunk: parse, tokenise, and hand back arrays and the bad lines (as values)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.indexed import token_dtype
from megatron.errors import DataError
from megatron.preprocess.documents import BadLine, LineError, Texts, parse_line
from megatron.preprocess.reader import Chunk
from megatron.tokenizer import Tokenizer, TokenizerSettings, build_tokenizer
from megatron.tokenizer.base import Ids


@dataclass(frozen=True, slots=True)
class Block:
    """The documents of one chunk under one key, end to end."""

    tokens: npt.NDArray[Any]  # uint16 or int32, as in the .bin
    sequence_lengths: npt.NDArray[np.int32]
    sequences_per_document: npt.NDArray[np.int32]  # 0 for an empty document
    text_bytes: int


@dataclass(slots=True)
class EncodedChunk:
    path: str
    position: int
    size: int
    documents: int = 0
    blank_lines: int = 0
    bad_lines: list[BadLine] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)  # one for each key


class ChunkEncoder:
    """Callable on chunks. It can be sent to a fresh process, where it opens the tokenizer for itself."""

    def __init__(
        self, settings: TokenizerSettings, keys: Sequence[str], append_eod: bool, tokenizer: Tokenizer | None = None
    ) -> None:
        self._settings, self._keys, self._append_eod = settings, list(keys), append_eod
        self._tokenizer = tokenizer or build_tokenizer(settings, announce=False)
        self._dtype = token_dtype(self._tokenizer.vocab_size)
        self._eod = np.array([self._tokenizer.eod] if append_eod else [], dtype=np.int32)

    def __reduce__(self) -> tuple[Any, ...]:
        return ChunkEncoder, (self._settings, self._keys, self._append_eod)

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        result = EncodedChunk(chunk.path, chunk.position, chunk.size)
        documents = self._parse(chunk, result)
        ids = [self._encode([texts for _, key_texts in documents for texts in key_texts[i]]) for i in self._key_range()]
        if any(encoded is None for encoded in ids):
            documents = self._without_refused(documents, result)
            ids = [self._encode([t for _, key_texts in documents for t in key_texts[i]]) for i in self._key_range()]
        result.documents = len(documents)
        for i, encoded in enumerate(ids):
            assert encoded is not None
            result.blocks.append(self._block([key_texts[i] for _, key_texts in documents], encoded))
        return result

    def _key_range(self) -> range:
        return range(len(self._keys))

    def _parse(self, chunk: Chunk, result: EncodedChunk) -> list[tuple[int, list[Texts]]]:
        documents = []
        for number, line in enumerate(chunk.lines, start=chunk.first_line):
            try:
                texts = parse_line(line, self._keys)
            except LineError as error:
                result.bad_lines.append(BadLine(number, error.kind, error.detail))
                continue
            if texts is None:
                result.blank_lines += 1
            else:
                documents.append((number, texts))
        return documents

    def _encode(self, texts: list[str]) -> list[Ids] | None:
        """None if the tokenizer refuses one of them."""
        try:
            return self._tokenizer.encode_batch(texts)
        except DataError:
            return None

    def _without_refused(
        self, documents: list[tuple[int, list[Texts]]], result: EncodedChunk
    ) -> list[tuple[int, list[Texts]]]:
        """Find the documents that the tokenizer refuses, one by one."""
        accepted = []
        for number, key_texts in documents:
            try:
                for texts in key_texts:
                    self._tokenizer.encode_batch(texts)
            except DataError as error:
                result.bad_lines.append(BadLine(number, "refused by the tokenizer", str(error)))
                continue
            accepted.append((number, key_texts))
        result.bad_lines.sort(key=lambda bad: bad.number)
        return accepted

    def _block(self, documents: list[Texts], encoded: list[Ids]) -> Block:
        """Empty sequences are left out, and a document of none gets no end-of-document token: Megatron's rule."""
        pieces: list[Ids] = []
        lengths: list[int] = []
        counts: list[int] = []
        arrays = iter(encoded)
        for texts in documents:
            sequences = [ids for ids in (next(arrays) for _ in texts) if len(ids)]
            lengths.extend(len(ids) for ids in sequences)
            counts.append(len(sequences))
            pieces.extend(sequences)
            if sequences and len(self._eod):
                pieces.append(self._eod)
                lengths[-1] += 1
        tokens = np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int32)
        return Block(
            tokens.astype(self._dtype),
            np.array(lengths, dtype=np.int32),
            np.array(counts, dtype=np.int32),
            sum(_utf8_size(text) for texts in documents for text in texts),
        )


def _utf8_size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8"))
