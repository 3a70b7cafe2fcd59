"""The datasets being written, one for each key: all of them get their names, or none does."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from megatron.data.indexed import DatasetSummary, IndexedDatasetBuilder, bin_path, idx_path, token_dtype
from megatron.data.record import make_record, record_path, write_record
from megatron.errors import ConfigError, DataError, StorageError
from megatron.preprocess.encoder import Block
from megatron.tokenizer import Tokenizer


@dataclass(frozen=True)
class KeyReport:
    """What was written for one key."""

    key: str
    summary: DatasetSummary
    text_bytes: int


def output_prefix(prefix: str, key: str) -> str:
    """Megatron's name for unsplit documents."""
    return f"{prefix}_{key}_document"


def refuse_existing(prefix: str, keys: Sequence[str]) -> None:
    """Before any work; the writer looks again when it gives the names."""
    for key in keys:
        for path in (bin_path(output_prefix(prefix, key)), idx_path(output_prefix(prefix, key))):
            if path.exists():
                raise ConfigError(f"--output-prefix {prefix}: {path} exists; give --overwrite to replace it")


class Outputs:
    """Nothing stands under a final name unless `finish` has come to its end."""

    def __init__(self, prefix: str, keys: Sequence[str], tokenizer: Tokenizer, *, overwrite: bool) -> None:
        self._keys, self._tokenizer = list(keys), tokenizer
        self._prefixes = [output_prefix(prefix, key) for key in keys]
        self._text_bytes = [0] * len(keys)
        self._tokens = [0] * len(keys)
        self._builders: list[IndexedDatasetBuilder] = []
        self._named: list[str] = []
        try:
            for path in self._prefixes:
                dtype = token_dtype(tokenizer.vocab_size)
                self._builders.append(IndexedDatasetBuilder(path, dtype, overwrite=overwrite))
        except StorageError as error:
            self._abort()
            raise StorageError(f"--output-prefix {prefix}: {error}") from None
        except BaseException:
            self._abort()
            raise

    def write(self, blocks: Sequence[Block]) -> None:
        for i, block in enumerate(blocks):
            _write_block(self._builders[i], block)
            self._text_bytes[i] += block.text_bytes
            self._tokens[i] += len(block.tokens)

    def finish(self, sources: Sequence[Path], *, append_eod: bool) -> list[KeyReport]:
        for key, tokens in zip(self._keys, self._tokens, strict=True):
            if not tokens:
                raise DataError(f"--json-keys {key}: every document is empty; nothing was written")
        with signals_deferred():
            return [self._finish_one(number, sources, append_eod) for number in range(len(self._keys))]

    def _finish_one(self, number: int, sources: Sequence[Path], append_eod: bool) -> KeyReport:
        key, prefix = self._keys[number], self._prefixes[number]
        try:
            summary = self._builders[number].finalize()
        except ConfigError:  # what stands there now is another run's
            raise
        except BaseException:
            self._named.append(prefix)
            raise
        self._named.append(prefix)
        record = make_record(
            prefix,
            tokenizer_fingerprint=self._tokenizer.fingerprint,
            vocab_size=self._tokenizer.vocab_size,
            eod_id=self._tokenizer.eod_id,
            max_id=summary.max_id,
            source=tuple(path.name for path in sources),
            extra={"tokenizer_type": self._tokenizer.name, "json_key": key, "append_eod": append_eod},
        )
        write_record(prefix, record)
        return KeyReport(key, summary, self._text_bytes[number])

    def __enter__(self) -> Outputs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._abort()

    def _abort(self) -> None:
        for builder in self._builders:
            builder.abort()
        for prefix in self._named:
            # The index first: without it the rest cannot be taken for a dataset.
            for path in (idx_path(prefix), bin_path(prefix), record_path(prefix)):
                path.unlink(missing_ok=True)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """A signal that comes while the files get their names is answered when all have theirs."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGHUP, signal.SIGINT))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _write_block(builder: IndexedDatasetBuilder, block: Block) -> None:
    if (block.sequences_per_document == 1).all():
        builder.add_documents(block.tokens, block.sequence_lengths)
        return
    sequence = token = 0
    for count in block.sequences_per_document.tolist():
        lengths = block.sequence_lengths[sequence : sequence + count]
        size = int(lengths.sum())
        builder.add_document(block.tokens[token : token + size], lengths.tolist())
        sequence += count
        token += size
