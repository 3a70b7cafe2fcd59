"""Encodes a segment in a worker: parses, tokenises and writes it, and returns sizes and checksums."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.indexed.index_file import token_dtype
from megatron.errors import DataError, MegatronError
from megatron.preprocess.input.documents import BadLine, Batch, Texts
from megatron.preprocess.input.segments import Segment, read_batches
from megatron.preprocess.options import PreprocessSettings
from megatron.preprocess.punkt import SentenceSplitter
from megatron.preprocess.worker_output import PARTS, Encoded, OutputWriter, SegmentFailure, SegmentResult
from megatron.tokenizer import EncoderDifference, Tokenizer, build_tokenizer
from megatron.tokenizer.base import Ids
from megatron.utils.durable import storage_error
from megatron.utils.plain_text import conversion

EXAMPLES_SHOWN = 10  # bad lines that are printed; the rest are only counted

Document = tuple[int, list[Texts]]  # the line within the segment, and the texts of each key


@dataclass(frozen=True, slots=True)
class Advance:
    """Progress of a worker since its last report."""

    number: int  # of the segment
    documents: int
    tokens: int
    size: int  # bytes of input, decompressed
    line: int  # in the segment, counted from 0; all lines before it are done


class _Stop(Exception):
    """Raised for a line that ends the run."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


class SegmentEncoder:
    """Encodes a segment when called. After unpickling in another process, it opens the tokenizer again."""

    def __init__(
        self,
        settings: PreprocessSettings,
        folder: Path,
        splitter: SentenceSplitter | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._settings, self._folder, self._splitter = settings, folder, splitter
        self._run = os.urandom(4).hex()  # part of file names, so that a worker of a killed run writes others
        self._tokenizer = tokenizer or build_tokenizer(settings.tokenizer, announce=False)
        self._dtype = token_dtype(self._tokenizer.vocab_size)
        self._eod = np.array([self._tokenizer.eod] if settings.append_eod else [], dtype=np.int32)

    def __reduce__(self) -> tuple[Any, ...]:
        return SegmentEncoder, (self._settings, self._folder, self._splitter)

    def __call__(self, segment: Segment, advance: Callable[[Advance], None]) -> SegmentResult | SegmentFailure:
        stem = f"{segment.number:08d}-{self._run}"
        result = SegmentResult(
            segment.number, segment.source.path, segment.start, segment.stop, segment.position, stem
        )  # fmt: skip
        error: MegatronError
        line = None
        try:
            self._encode_segment(segment, result, advance)
            return result
        except _Stop as stop:
            error, line = DataError(str(stop)), stop.line
        except MegatronError as refused:
            error = refused
        except OSError as failed:
            error = storage_error(self._folder / stem, failed)
        return SegmentFailure(segment.number, type(error), str(error), segment.source, segment.start, line)

    def _encode_segment(self, segment: Segment, result: SegmentResult, advance: Callable[[Advance], None]) -> None:
        with ExitStack() as files:
            writers = []
            for key in range(len(self._settings.json_keys)):
                paths = [result.file(self._folder, key, part) for part in PARTS]
                writers.append(files.enter_context(closing(OutputWriter(paths))))
            for batch in read_batches(segment, self._settings.json_keys):
                self._encode_batch(batch, result, writers, advance)
            result.outputs = [writer.finish() for writer in writers]

    def _encode_batch(
        self, batch: Batch, result: SegmentResult, writers: Sequence[OutputWriter], advance: Callable[[Advance], None]
    ) -> None:
        result.lines = batch.first_line + batch.lines
        result.size += batch.size
        result.blank += batch.blank
        for bad in batch.bad:
            self._note_bad(result, bad)
        size = batch.size
        for documents in self._slices(batch.documents):
            tokens = self._encode_documents(documents, result, writers)
            line = documents[-1][0] + 1
            advance(Advance(result.number, len(documents), tokens, size, line))
            size = 0
        if size:
            advance(Advance(result.number, 0, 0, size, result.lines))

    def _slices(self, documents: list[Document]) -> Iterator[list[Document]]:
        step = self._settings.chunk_size or max(len(documents), 1)
        for start in range(0, len(documents), step):
            yield documents[start : start + step]

    def _note_bad(self, result: SegmentResult, bad: BadLine) -> None:
        if self._settings.on_error == "stop":
            way = "correct the line, or give --on-error skip to skip it"
            if bad.kind == "key missing":
                way = f"change --json-keys {' '.join(self._settings.json_keys)} to the key of the text, or {way}"
            elif bad.kind == "not JSON":
                way = conversion(result.source) or way
            raise _Stop(f"{bad}; {way}", bad.number)
        result.bad[bad.kind] = result.bad.get(bad.kind, 0) + 1
        if len(result.examples) < EXAMPLES_SHOWN:
            result.examples.append((bad.number, str(bad)))

    def _encode_documents(
        self, documents: list[Document], result: SegmentResult, writers: Sequence[OutputWriter]
    ) -> int:
        """Encodes and writes the documents; returns the number of tokens over all keys."""
        encoded = self._encode_keys(documents)
        if encoded is None:
            documents = self._without_refused(documents, result)
            encoded = self._encode_keys(documents)
            assert encoded is not None
        result.documents += len(documents)
        for writer, key in zip(writers, encoded, strict=True):
            writer.add(key)
        return sum(len(key.tokens) for key in encoded)

    def _encode_keys(self, documents: list[Document]) -> list[Encoded] | None:
        """Encodes each key; returns None if the tokenizer rejects a text."""
        encoded = []
        for key in range(len(self._settings.json_keys)):
            texts = [self._split(texts[key]) for _, texts in documents]
            try:
                encoded.append(self._encode_key(texts))
            except EncoderDifference as difference:
                owners = [line for (line, _), mine in zip(documents, texts, strict=True) for _ in mine]
                raise _Stop(str(difference), owners[difference.index]) from None
            except DataError:
                return None
        return encoded

    def _split(self, texts: Texts) -> Texts:
        if self._splitter is None:
            return texts
        return [sentence for text in texts for sentence in self._splitter.split(text)]

    def _without_refused(self, documents: list[Document], result: SegmentResult) -> list[Document]:
        """Encodes document by document, and leaves out those that the tokenizer rejects."""
        accepted = []
        for number, key_texts in documents:
            try:
                for texts in key_texts:
                    self._tokenizer.encode_batch(self._split(texts))
            except DataError as error:
                self._note_bad(result, BadLine(number, "rejected by the tokenizer", str(error)))
                continue
            accepted.append((number, key_texts))
        return accepted

    def _encode_key(self, documents: list[Texts]) -> Encoded:
        """Encodes documents by Megatron's rules: drops empty sequences. An empty document gets no end-of-document
        token."""
        texts = [text for mine in documents for text in mine]
        ids = self._tokenizer.encode_batch(texts)
        sizes = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        counts = np.fromiter(map(len, documents), dtype=np.int64, count=len(documents))
        if not (sizes > 0).all():
            owner = np.repeat(np.arange(len(documents)), counts)
            counts = np.bincount(owner[sizes > 0], minlength=len(documents))
            ids = [sequence for sequence in ids if len(sequence)]
            sizes = sizes[sizes > 0]
        if len(self._eod) and len(ids):
            last = np.cumsum(counts)[counts > 0] - 1  # the last sequence of each document
            sizes[last] += 1
            ids = _with_eod(ids, last, self._eod)
        return Encoded(
            self._narrowed(np.concatenate(ids) if ids else np.empty(0, dtype=np.int32)),
            sizes.astype(np.int32),
            counts.astype(np.int32),
            sum(map(_utf8_size, texts)),
        )

    def _narrowed(self, tokens: np.ndarray) -> np.ndarray:
        """Converts ids to the stored dtype. Asserts that no id is outside the vocabulary, which would wrap around."""
        assert not len(tokens) or 0 <= int(tokens.min()) <= int(tokens.max()) < self._tokenizer.vocab_size
        return tokens.astype(self._dtype)


def _with_eod(ids: list[Ids], last: np.ndarray, eod: Ids) -> list[Ids]:
    if len(last) == len(ids):
        return [piece for sequence in ids for piece in (sequence, eod)]
    pieces = []
    ends = set(last.tolist())
    for number, sequence in enumerate(ids):
        pieces.append(sequence)
        if number in ends:
            pieces.append(eod)
    return pieces


def _utf8_size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8"))


def remove_files(result: SegmentResult, folder: Path, keys: int) -> None:
    for key in range(keys):
        for part in PARTS:
            result.file(folder, key, part).unlink(missing_ok=True)
