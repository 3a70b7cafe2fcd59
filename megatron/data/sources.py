"""Opens and checks each source of a run once for all splits and blends."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from megatron.config.blend import fetch_first
from megatron.data.indexed.dataset import IndexedDataset, idx_path
from megatron.data.indexed.files import allow_files_for_sources, is_mapped, map_tokens
from megatron.data.indexed.record import DataRecord, Fingerprint, check_files, check_tokenizer, read_record, record_path
from megatron.data.remote import is_url
from megatron.data.sft.conversations import Conversations
from megatron.errors import ConfigError
from megatron.utils.token_difference import TokenTexts

if TYPE_CHECKING:
    from megatron.config.sections.data import DataConfig

_SHUFFLED = "sequences are shuffled, not documents"
_NAMED = 3  # if a note is about more sources than this, it names only the first one
_MAPPED_AT_ONCE = 512  # .bin files
_LOOKED_AT = 64  # documents whose last token is checked
_BLOCK = 1 << 16  # documents per block
_FEWEST_BLOCKS, _MOST_BLOCKS, _ALL_BLOCKS = 2, 16, 1024  # blocks sampled per source: bounds; over all sources: most
_NO_RECORD = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True)
class Source:
    data: IndexedDataset | Conversations
    index_fingerprint: str
    record_digest: str


@dataclass(frozen=True)
class SourceContent:
    """Digests of a source, which must be equal on all machines that read it."""

    prefix: str
    content: str
    """Digest of the index and of a sample of the tokens."""
    record: str
    """Digest of the source's .meta.json; empty without one."""


class Sources:
    """The opened sources. Rejects data made with another eod_id, vocabulary or tokenizer than the run's."""

    def __init__(
        self,
        config: "DataConfig",
        *,
        vocab_size: int | None,
        eod_id: int | None,
        tokenizer_fingerprint: Fingerprint,
        tokenizer: TokenTexts | None = None,
    ) -> None:
        self.config, self._tokenizer = config, tokenizer
        self._vocab_size, self._eod_id, self._tokenizer_fingerprint = vocab_size, eod_id, tokenizer_fingerprint
        self._opened: dict[str, Source] = {}
        # The most recently read files stay mapped. Arrays already returned stay valid: they hold their map.
        self._pool = lru_cache(_MAPPED_AT_ONCE)(map_tokens)
        self._mapped_indices = 0
        self._borders = border_flag(config)
        self._unrecorded: list[str] = []
        self._in_sequences: list[IndexedDataset] = []

    def __len__(self) -> int:
        return len(self._opened)

    def prepare(self, prefixes: Sequence[str]) -> None:
        """Raises the limit on open files to what these sources need, or rejects them if that is not allowed."""
        for prefix in filter(is_url, prefixes):
            raise ConfigError(fetch_first("data path", prefix))
        new = set(prefixes) - self._opened.keys()
        self._mapped_indices += sum(is_mapped(idx_path(prefix)) for prefix in new)
        count = len(self._opened) + len(new)
        read = min(count, _MAPPED_AT_ONCE) if self.config.mmap_bin_files else count
        allow_files_for_sources(count, read + self._mapped_indices)

    def open(self, prefix: str) -> Source:
        if prefix not in self._opened:
            self._opened[prefix] = self._open(prefix)
        return self._opened[prefix]

    def _open(self, prefix: str) -> Source:
        data = IndexedDataset(prefix, mmap=self.config.mmap_bin_files, pool=self._pool)
        fingerprint, digest = data.fingerprint, ""
        record = read_record(prefix)
        if record is None:
            self._unrecorded.append(prefix)
        else:
            digest = hashlib.sha256(record_path(prefix).read_bytes()).hexdigest()
            check_files(record, data, fingerprint)
            check_tokenizer(
                record,
                prefix,
                tokenizer_fingerprint=self._tokenizer_fingerprint,
                vocab_size=self._vocab_size,
                eod_id=self._eod_id,
                tokenizer=self._tokenizer,
            )
        if self._borders is not None:
            self._check_borders(data, record, self._borders)
        if len(data) != data.num_documents:
            self._in_sequences.append(data)
        return Source(data, fingerprint, digest)

    def _check_borders(self, data: IndexedDataset, record: DataRecord | None, flag: str) -> None:
        """Rejects data without end-of-document tokens: the setting `flag` would have no effect."""
        last = _last_sequences(data, _LOOKED_AT)
        marked = any(int(data.get(sequence)[-1]) == self._eod_id for sequence in last)
        if (last and not marked) or (record is not None and record.extra.get("append_eod") is False):
            raise ConfigError(
                f"{flag}: the documents of {data.prefix} do not end with the end-of-document token {self._eod_id}, "
                f"so the ends of documents cannot be found; preprocess the data again with --append-eod, or remove "
                f"{flag}"
            )

    def notes(self) -> list[str]:
        notes = _listed(
            self._unrecorded, "no record of the tokenizer (.meta.json), so token ids are checked in each batch"
        )
        if len(self._in_sequences) <= _NAMED:
            return notes + [
                f"{data.prefix}: {data.num_documents} documents with {len(data)} sequences in total: {_SHUFFLED}"
                for data in self._in_sequences
            ]
        documents = sum(data.num_documents for data in self._in_sequences)
        sequences = sum(len(data) for data in self._in_sequences)
        first, count = self._in_sequences[0].prefix, len(self._in_sequences)
        return [
            *notes,
            f"{first} and {count - 1} other sources: {documents} documents with {sequences} sequences in total: "
            f"{_SHUFFLED}",
        ]

    def contents(self) -> tuple[SourceContent, ...]:
        """Returns the digests of each source. The more sources, the fewer blocks of each are sampled."""
        blocks = max(_FEWEST_BLOCKS, min(_MOST_BLOCKS, _ALL_BLOCKS // max(1, len(self._opened))))
        found = []
        for prefix, source in self._opened.items():
            both = f"{source.index_fingerprint} {source.data.sampled(blocks)}"
            found.append(SourceContent(prefix, hashlib.sha256(both.encode()).hexdigest(), source.record_digest))
        return tuple(found)

    def fingerprint(self, mixture: str) -> str:
        """Hash of each source's index and record, independent of paths, and of `mixture` ("" without a blend)."""
        digest = hashlib.sha256()
        for source in self._opened.values():
            record = source.record_digest or _NO_RECORD
            digest.update(f"{source.index_fingerprint} {record}\n".encode())
        digest.update(mixture.encode())
        return digest.hexdigest()


def _last_sequences(data: IndexedDataset, count: int) -> list[int]:
    """Returns the last sequence of each of the first `count` non-empty documents."""
    found: list[int] = []
    for start in range(0, data.num_documents, _BLOCK):
        bounds = data.document_indices[start : start + _BLOCK + 1]
        last = bounds[1:][np.diff(bounds) > 0] - 1
        found += last[data.sequence_lengths[last] > 0].tolist()
        if len(found) >= count:
            break
    return found[:count]


def _listed(prefixes: list[str], text: str) -> list[str]:
    if len(prefixes) <= _NAMED:
        return [f"{prefix}: {text}" for prefix in prefixes]
    return [f"{prefixes[0]} and {len(prefixes) - 1} other sources: {text}"]


def check_border_flag(config: "DataConfig", eod_id: int | None) -> None:
    flag = border_flag(config)
    if flag is not None and eod_id is None:
        raise ConfigError(f"{flag}: the tokenizer has no end-of-document id; use another tokenizer, or remove {flag}")


def border_flag(config: "DataConfig") -> str | None:
    """Returns the active flag that needs an end-of-document token after each document, if any."""
    for name in ("reset_attention_mask", "dataloader_inter_document_masking", "reset_position_ids", "eod_mask_loss"):
        if getattr(config, name):
            return "--" + name.replace("_", "-")
    return None
