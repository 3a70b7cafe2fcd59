"""Concatenates datasets into one. Streams in constant memory, and checks every input against its record."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron.data.indexed.builder import DatasetSummary, IndexedDatasetBuilder
from megatron.data.indexed.checksums import FileChecksums, refuse_damage
from megatron.data.indexed.dataset import IndexedDataset, bin_path
from megatron.data.indexed.record import (
    FIRST_TOKENS,
    DataRecord,
    check_files,
    make_record,
    read_record,
    record_path,
    write_record,
)
from megatron.data.parts import Group, partition_of
from megatron.errors import ConfigError, DataError
from megatron.utils.durable import BlockHasher

_NAMED = 3


@dataclass(frozen=True)
class MergeInput:
    """One input dataset, inspected before anything is written."""

    prefix: str
    dtype: str
    size: int  # bytes of the .bin
    legacy: bool
    record: DataRecord | None


@dataclass(frozen=True)
class MergeResult:
    summary: DatasetSummary
    parts: int
    notes: tuple[str, ...]


Impl = Literal["mmap", "lazy", "cached"]


def merge(
    groups: Sequence[Group],
    *,
    overwrite: bool = False,
    impl: Impl | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
) -> list[MergeResult]:
    """Merges each group into its output. Renames the outputs together, when all are complete.

    `impl` None keeps the inputs' index format. `on_bytes` receives the bytes copied so far and the total.
    """
    parts = [[look_at(prefix) for prefix in group.prefixes] for group in groups]
    for members in parts:
        refuse_differences(members)
        refuse_other_runs(members)
    total, copied = sum(part.size for members in parts for part in members), 0

    def count(data: memoryview) -> None:
        nonlocal copied
        copied += len(data)
        if on_bytes is not None:
            on_bytes(copied, total)

    with contextlib.ExitStack() as undo:
        builders = []
        for group, members in zip(groups, parts, strict=True):
            builder = IndexedDatasetBuilder(
                group.output, members[0].dtype, overwrite=overwrite, impl=impl or _impl_of(members)
            )
            undo.callback(builder.abort)
            builders.append(builder)
        for builder, members in zip(builders, parts, strict=True):
            for part in members:
                _append(builder, part, count)
        return [_finish(builder, members) for builder, members in zip(builders, parts, strict=True)]


def look_at(prefix: str) -> MergeInput:
    data = IndexedDataset(prefix)
    record = read_record(prefix)
    if record is not None:
        _refuse_foreign_record(prefix, record, data)
    part = MergeInput(prefix, data.dtype.name, data.num_tokens * data.dtype.itemsize, data.legacy, record)
    data.close()
    return part


def _refuse_foreign_record(prefix: str, record: DataRecord, data: IndexedDataset) -> None:
    check_files(record, data, data.fingerprint)
    named, said = partition_of(prefix), record.extra.get("partition")
    if named is None or not isinstance(said, dict):
        return
    if (said.get("rank"), said.get("world")) != (named.rank, named.world):
        raise DataError(
            f"{record_path(prefix)}: the record says partition {said.get('rank')} of {said.get('world')}, "
            f"but the file name says {named.rank} of {named.world}; give the files their original names"
        )


def refuse_differences(parts: Sequence[MergeInput]) -> None:
    """Rejects inputs that differ in token dtype, tokenizer or end-of-document marking."""
    first = parts[0]
    for part in parts:
        if part.dtype != first.dtype:
            raise DataError(
                f"{part.prefix}: token dtype {part.dtype}, but {first.prefix} has {first.dtype}; "
                "preprocess one of them again with the other's tokenizer, or mix them with --data-path"
            )
    recorded = [(part.prefix, part.record) for part in parts if part.record is not None]
    for prefix, record in recorded:
        other_prefix, other = recorded[0]
        if record.tokenizer_fingerprint != other.tokenizer_fingerprint:
            raise DataError(
                f"{prefix}: made with another tokenizer (vocabulary {record.vocab_size}) than {other_prefix} "
                f"(vocabulary {other.vocab_size}); preprocess one of them again with the other's tokenizer"
            )
        if None not in (record.append_eod, other.append_eod) and record.append_eod != other.append_eod:
            with_eod, without = (prefix, other_prefix) if record.append_eod else (other_prefix, prefix)
            raise ConfigError(
                f"{without}: made without --append-eod and {with_eod} with it; preprocess one of them again "
                f"(or remove {record_path(without)} to merge them regardless)"
            )


def refuse_other_runs(parts: Sequence[MergeInput]) -> None:
    """Rejects partitions of different runs: other input files or other settings."""
    first_of: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {}
    for part in parts:
        named, said = partition_of(part.prefix), part.record.extra.get("partition") if part.record else None
        if named is None or not isinstance(said, dict):
            continue
        first, wanted = first_of.setdefault((named.base, named.rest), (part.prefix, said))
        if said.get("inputs") != wanted.get("inputs"):
            raise ConfigError(
                f"{part.prefix}: made from other --input files (names, sizes or order) than {first}, so documents "
                "would be missing or doubled; preprocess one of them again with the other's --input"
            )
        if said.get("settings") != wanted.get("settings"):
            raise ConfigError(
                f"{part.prefix}: made with other settings than {first} (--json-keys, --split-sentences, --lang or "
                "similar); preprocess one of them again with the other's settings"
            )


def _impl_of(parts: Sequence[MergeInput]) -> Impl:
    return "lazy" if all(part.legacy for part in parts) else "mmap"


def _append(builder: IndexedDatasetBuilder, part: MergeInput, count: Callable[[memoryview], None]) -> None:
    known = part.record.bin if part.record is not None else None
    sums = BlockHasher(known.block_bytes) if known is not None else None

    def see(data: memoryview) -> None:
        if sums is not None:
            sums.update(data)
        count(data)

    builder.add_dataset(part.prefix, on_block=see)
    if known is not None and sums is not None:
        refuse_damage(bin_path(part.prefix), FileChecksums.of(sums), known)


def _finish(builder: IndexedDatasetBuilder, parts: Sequence[MergeInput]) -> MergeResult:
    summary = builder.finalize()
    missing = [part.prefix for part in parts if part.record is None]
    records = [part.record for part in parts if part.record is not None]
    if not missing:
        write_record(builder.prefix, joined_record(builder.prefix, records, summary.max_id, summary.checksums))
        return MergeResult(summary, len(parts), ())
    more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    note = f"no record (.meta.json) was written, because {', '.join(missing[:_NAMED])}{more} had none"
    return MergeResult(summary, len(parts), (note,))


def joined_record(prefix: str, records: Sequence[DataRecord], max_id: int, checksums: FileChecksums) -> DataRecord:
    """Makes the record of a merged dataset: the common tokenizer, all sources, and the settings that are equal."""
    first = records[0]
    beginning = {name: value for name, value in first.extra.items() if name == FIRST_TOKENS}
    return make_record(
        prefix,
        tokenizer_fingerprint=first.tokenizer_fingerprint,
        vocab_size=first.vocab_size,
        eod_id=first.eod_id,
        max_id=max_id,
        source=_sources(records),
        extra={**_agreed(record.extra for record in records), **_whole(records), **beginning},
        bin_checksums=checksums,
    )


def _sources(records: Sequence[DataRecord]) -> tuple[str, ...]:
    if all(record.source == records[0].source for record in records):
        return records[0].source  # each partition lists all files of the run
    return tuple(dict.fromkeys(name for record in records for name in record.source))


def _whole(records: Sequence[DataRecord]) -> dict[str, Any]:
    """Returns the settings digest of the unpartitioned run if these are all its partitions, else nothing."""
    said = [record.extra.get("partition") for record in records]
    parts = [part for part in said if isinstance(part, dict) and part.get("whole")]
    whole = {part["whole"] for part in parts}
    places = [(part.get("rank"), part.get("world")) for part in parts]
    if len(whole) != 1 or places != [(rank, len(records)) for rank in range(len(records))]:
        return {}
    return {"settings": whole.pop()}


def _agreed(extras: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Returns the settings that all records share, without `partition`."""
    first, *others = list(extras)
    kept = {name: value for name, value in first.items() if name != "partition"}
    absent = object()
    return {name: value for name, value in kept.items() if all(e.get(name, absent) == value for e in others)}
