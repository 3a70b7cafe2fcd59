"""Verifies a whole dataset: the checksum of every byte, the range of every id, the end of every document."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from megatron.data.indexed.checksums import BLOCK_BYTES, mapped_blocks, verify_blocks
from megatron.data.indexed.dataset import IndexedDataset, bin_path, idx_path
from megatron.data.indexed.index_file import AGAIN
from megatron.data.indexed.record import OR_REMOVE, DataRecord, check_files, record_path
from megatron.errors import DataError

_READ_BYTES = 4 << 20


@dataclass
class Verified:
    """Result of a verification: the checks that ran, and those that could not."""

    bytes: int = 0
    min_id: int | None = None
    max_id: int | None = None
    eod_inside: int = 0  # end-of-document ids that are not the last of their document
    checked: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Rules:
    blocks: tuple[str, ...] | None
    block_bytes: int
    vocab_size: int | None
    eod_id: int | None
    must_end: bool  # every document with tokens ends with eod_id


@dataclass
class _Seen:
    """The findings in one block of the .bin."""

    low: int = np.iinfo(np.int64).max
    high: int = np.iinfo(np.int64).min
    eod: int = 0
    ends: int = 0  # documents that end with eod_id
    damage: str | None = None


def verify_dataset(
    prefix: str,
    record: DataRecord | None,
    *,
    vocab_size: int | None = None,
    eod_id: int | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
) -> Verified:
    """Verifies every byte; raises DataError at the first damage. Ids must be below `vocab_size` and below the record's
    vocabulary size. `eod_id` applies only if the record has none."""
    data = IndexedDataset(prefix, mmap=False)  # checks lengths, offsets and sizes
    result = Verified(checked=["lengths and offsets"])
    try:
        if record is not None:
            _check_record(prefix, record, data)
        rules = _rules(record, vocab_size, eod_id, result)
        _scan(data, rules, result, on_bytes)
    finally:
        data.close()
    if record is not None and result.max_id is not None and result.max_id != record.max_id:
        raise DataError(
            f"{record_path(prefix)}: max_id {record.max_id}, but the largest id is {result.max_id}; {OR_REMOVE}"
        )
    return result


def _check_record(prefix: str, record: DataRecord, data: IndexedDataset) -> None:
    if record.idx is not None:
        verify_blocks(idx_path(prefix), record.idx)
    check_files(record, data, data.fingerprint)
    bin_bytes = data.num_tokens * data.dtype.itemsize
    if record.bin is not None and record.bin.size != bin_bytes:
        raise DataError(
            f"{record_path(prefix)}: checksums: bin: size {record.bin.size}, but the file has {bin_bytes} bytes; "
            f"{OR_REMOVE}"
        )


def _rules(record: DataRecord | None, vocab_size: int | None, eod_id: int | None, result: Verified) -> _Rules:
    known = record.bin if record is not None else None
    if record is not None:
        vocab_size = min(record.vocab_size, vocab_size or record.vocab_size)
        eod_id = record.eod_id if record.eod_id is not None else eod_id
    must_end = record is not None and record.append_eod is True and eod_id is not None
    no_record = "there is no record (.meta.json)"
    for what, can, why in (
        ("checksums of every block", known is not None, "its record has none" if record is not None else no_record),
        (f"ids below {vocab_size}", vocab_size is not None, f"{no_record}; give --vocab-size or a tokenizer"),
        (
            f"end of document ({eod_id}) at each document's end",
            must_end,
            no_record if record is None else "its record does not state --append-eod",
        ),
    ):
        if can:
            result.checked.append(what)
        else:
            name = what.replace(" below None", " in range").replace(f" ({eod_id})", "")
            result.not_checked.append(f"{name}: {why}")
    blocks, size = (known.blocks, known.block_bytes) if known is not None else (None, BLOCK_BYTES)
    return _Rules(blocks, size, vocab_size, eod_id, must_end)


def _scan(data: IndexedDataset, rules: _Rules, result: Verified, on_bytes: Callable[[int, int], None] | None) -> None:
    total = data.num_tokens * data.dtype.itemsize
    numbers = range(-(-total // rules.block_bytes))

    def look_at(file: int, number: int) -> _Seen:
        return _look_at(file, data, rules, number, total)

    with mapped_blocks(bin_path(data.prefix), numbers, look_at) as blocks:  # reading and hashing release the GIL
        for seen in blocks:
            if seen.damage is not None:
                raise DataError(seen.damage)
            result.bytes = min(result.bytes + rules.block_bytes, total)
            result.min_id = seen.low if result.min_id is None else min(result.min_id, seen.low)
            result.max_id = seen.high if result.max_id is None else max(result.max_id, seen.high)
            result.eod_inside += seen.eod - seen.ends
            if on_bytes is not None:
                on_bytes(result.bytes, total)


def _look_at(descriptor: int, data: IndexedDataset, rules: _Rules, number: int, total: int) -> _Seen:
    start = number * rules.block_bytes
    stop = min(start + rules.block_bytes, total)
    seen, digest, position = _Seen(), hashlib.sha256(), start
    while position < stop:
        part = os.pread(descriptor, min(_READ_BYTES, stop - position), position)
        part = part[: len(part) // data.dtype.itemsize * data.dtype.itemsize]
        if not part:
            seen.damage = f"{bin_path(data.prefix)}: ends at byte {position}; it was truncated while in use"
            return seen
        if rules.blocks is not None:
            digest.update(part)
        if seen.damage is None:
            _look_at_tokens(data, rules, position, np.frombuffer(part, dtype=data.dtype), seen)
        position += len(part)
    if rules.blocks is not None and digest.hexdigest() != rules.blocks[number]:
        documents = f"documents {data.document_at(start)} to {data.document_at(stop - 1)}"
        inside = f"; {seen.damage.partition(': ')[2]}" if seen.damage else f"; {AGAIN}"
        seen.damage = (
            f"{bin_path(data.prefix)}: damaged: block {number}, bytes {start} to {stop} ({documents}), "
            f"is not what was written{inside}"
        )
    return seen


def _look_at_tokens(data: IndexedDataset, rules: _Rules, position: int, ids: np.ndarray, seen: _Seen) -> None:
    low, high = int(ids.min()), int(ids.max())
    seen.low, seen.high = min(seen.low, low), max(seen.high, high)
    limit = rules.vocab_size if rules.vocab_size is not None else high + 1
    if low < 0 or high >= limit:
        at = int(np.argmax((ids < 0) | (ids >= limit)))
        wanted = f"0 to {limit - 1}" if rules.vocab_size is not None else "0 or more"
        seen.damage = _at(data, position, at, f"token id {int(ids[at])}, but ids must be {wanted}")
        return
    if rules.eod_id is None:
        return
    seen.eod += int(np.count_nonzero(ids == rules.eod_id))
    first, last = data.documents_ending_in(position, position + ids.nbytes)
    bounds = data.document_bounds(first, last)
    ends = bounds[1:][bounds[1:] > bounds[:-1]]  # of documents with tokens
    places = (ends - position) // data.dtype.itemsize - 1
    marked = ids[places] == rules.eod_id
    seen.ends += int(np.count_nonzero(marked))
    if rules.must_end and not marked.all():
        at = int(places[np.argmin(marked)])
        wanted = f"does not end with the end-of-document token {rules.eod_id}, but with"
        seen.damage = _at(data, position, at, f"the document {wanted} {int(ids[at])}")


def _at(data: IndexedDataset, position: int, token: int, what: str) -> str:
    start = position + token * data.dtype.itemsize
    stop = start + data.dtype.itemsize
    document = data.document_at(start)
    return f"{bin_path(data.prefix)}: bytes {start} to {stop} (document {document}): {what}; {AGAIN}"
