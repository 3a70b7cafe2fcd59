"""PREFIX.meta.json: the record of how a dataset was made. It is written last: a dataset with a record is complete."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.data.indexed.checksums import FileChecksums, checksums_of
from megatron.data.indexed.dataset import IndexedDataset, bin_path, idx_path
from megatron.data.indexed.files import regular_file_size
from megatron.errors import DataError
from megatron.utils.durable import write_atomically, writing
from megatron.utils.token_difference import TokenTexts, token_difference
from megatron.utils.typed import typed
from megatron.version import __version__

FORMAT = "megatron-data-record"
VERSION = 1
_MAX_BYTES = 1 << 30
FIRST_TOKENS = "first_tokens"
"""Name of the record's field with token ids from the beginning of the data and their texts."""
_SAMPLED = 4096
"""Tokens at the beginning of the data whose ids are recorded with their texts, each id once."""
OR_REMOVE = "run tools/preprocess_data.py again, or remove the record if the files are right"

Fingerprint = str | tuple[str, ...] | None
"""Fingerprint of the run's tokenizer, or all fingerprints that any release records for it; None without a tokenizer."""


@dataclass(frozen=True, kw_only=True)
class DataRecord:
    tokenizer_fingerprint: str
    vocab_size: int
    eod_id: int | None
    dtype: str
    documents: int
    sequences: int
    tokens: int
    max_id: int  # -1 without tokens
    index_fingerprint: str  # of the .idx that this record belongs to
    source: tuple[str, ...]
    bin: FileChecksums | None = None  # None in records of earlier releases
    idx: FileChecksums | None = None
    tool_version: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # fields of later versions, kept unchecked

    @property
    def append_eod(self) -> bool | None:
        """True if each document ends with the end-of-document token; None if unknown."""
        value = self.extra.get("append_eod")
        return value if isinstance(value, bool) else None

    @property
    def files(self) -> dict[str, FileChecksums]:
        return {suffix: known for suffix, known in (("bin", self.bin), ("idx", self.idx)) if known is not None}


def record_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.meta.json")


def make_record(
    prefix: str | Path,
    *,
    tokenizer_fingerprint: str,
    vocab_size: int,
    eod_id: int | None,
    max_id: int,
    source: tuple[str, ...] = (),
    extra: dict[str, Any] | None = None,
    bin_checksums: FileChecksums | None = None,
) -> DataRecord:
    """Makes the record of a complete dataset. Reads the whole .bin unless its checksums are passed."""
    data = IndexedDataset(prefix)
    return DataRecord(
        tokenizer_fingerprint=tokenizer_fingerprint,
        vocab_size=vocab_size,
        eod_id=eod_id,
        dtype=data.dtype.name,
        documents=data.num_documents,
        sequences=len(data),
        tokens=data.num_tokens,
        max_id=max_id,
        index_fingerprint=data.fingerprint,
        source=source,
        bin=bin_checksums or checksums_of(bin_path(prefix)),
        idx=checksums_of(idx_path(prefix)),
        tool_version=__version__,
        extra=extra or {},
    )


def write_record(prefix: str | Path, record: DataRecord) -> Path:
    path = record_path(prefix)
    content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(record)}
    files, extra = {suffix: content.pop(suffix) for suffix in ("bin", "idx")}, content.pop("extra")
    if record.files:
        content["checksums"] = {suffix: files[suffix] for suffix in record.files}
    content.update(extra)
    with writing(path):
        write_atomically(path, [json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n"])
    return path


def read_record(prefix: str | Path) -> DataRecord | None:
    """Reads the record; returns None for data without one, such as Megatron's."""
    path = record_path(prefix)
    if not path.exists():
        return None
    if regular_file_size(path, "data record") > _MAX_BYTES:
        raise DataError(f"{path}: larger than {_MAX_BYTES} bytes, not a data record; remove it")
    again = "run tools/preprocess_data.py again, or remove the record to use the data without it"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not readable as JSON ({error}); {again}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(f"{path}: format: not {FORMAT!r}; {again}")
    if content.get("version") != VERSION:
        raise DataError(f"{path}: version {content.get('version')!r:.60}, but only {VERSION} is supported; {again}")
    return _parse(path, content, again)


def _parse(path: Path, content: dict[str, Any], again: str) -> DataRecord:
    own = {field.name for field in dataclasses.fields(DataRecord)} - {"bin", "idx", "extra"}
    known = {name: value for name, value in content.items() if name in own}
    extra = {name: value for name, value in content.items() if name not in own | {"format", "version", "checksums"}}
    try:
        record = typed(DataRecord, {**known, "extra": extra})
    except ValueError as error:
        raise DataError(f"{path}: {error}; {again}") from None
    impossible = _impossible(record)
    if impossible is not None:
        raise DataError(f"{path}: {impossible}; {again}")
    files = _parse_checksums(path, content.get("checksums", {}), again)
    return dataclasses.replace(record, bin=files.get("bin"), idx=files.get("idx"))


def _impossible(record: DataRecord) -> str | None:
    """Returns the first value that no dataset can have, or None."""
    vocabulary, highest, eod = record.vocab_size, record.max_id, record.eod_id
    for name in ("documents", "sequences", "tokens"):
        if getattr(record, name) < 0:
            return f"{name}: {getattr(record, name)} is negative"
    if vocabulary < 1:
        return f"vocab_size: {vocabulary}, but a vocabulary has at least one entry"
    if not -1 <= highest < vocabulary:
        return f"max_id: {highest} is not an id of a vocabulary of {vocabulary}"
    if eod is not None and not 0 <= eod < vocabulary:
        return f"eod_id: {eod} is not an id of a vocabulary of {vocabulary}"
    return None


def _parse_checksums(path: Path, content: Any, again: str) -> dict[str, FileChecksums]:
    if not isinstance(content, dict):
        raise DataError(f"{path}: checksums: not an object; {again}")
    files = {}
    for suffix in ("bin", "idx"):
        if suffix in content:
            try:
                files[suffix] = typed(FileChecksums, content[suffix])
            except ValueError as error:
                raise DataError(f"{path}: checksums: {suffix}: {error}; {again}") from None
    return files


def first_tokens(data: IndexedDataset, tokenizer: TokenTexts) -> list[list[Any]]:
    """Returns distinct token ids from the beginning of the data, with their texts. Comparing the texts shows whether a
    run has another tokenizer."""
    ids: list[int] = []
    for sequence in range(min(len(data), _SAMPLED)):
        if len(ids) >= _SAMPLED:
            break
        ids += data.get(sequence)[: _SAMPLED - len(ids)].tolist()
    return [[number, tokenizer.detokenize([number])] for number in dict.fromkeys(ids)]


def difference_of(record: DataRecord, tokenizer: TokenTexts | None) -> str:
    """Names the first recorded token to which `tokenizer` gives another id; "" if none is known."""
    listed = record.extra.get(FIRST_TOKENS)
    pairs = [pair for pair in listed if isinstance(pair, list) and len(pair) == 2] if isinstance(listed, list) else []
    recorded = [(number, text) for number, text in pairs if type(number) is int and number >= 0]
    known = [(number, text) for number, text in recorded if isinstance(text, str)]
    return "" if tokenizer is None else token_difference(known, "the data", tokenizer)


def check_files(record: DataRecord, data: IndexedDataset, data_fingerprint: str) -> None:
    """Checks that the record belongs to these files and that its counts match."""
    path = record_path(data.prefix)
    if record.index_fingerprint != data_fingerprint or record.tokens != data.num_tokens:
        raise DataError(
            f"{path}: index_fingerprint: the record describes other .bin/.idx files than those beside it "
            f"(the record has {record.tokens} tokens, the files {data.num_tokens}); {OR_REMOVE}"
        )
    for name, said, found in (
        ("documents", record.documents, data.num_documents),
        ("sequences", record.sequences, len(data)),
        ("dtype", record.dtype, data.dtype.name),
    ):
        if said != found:
            raise DataError(f"{path}: {name} {said}, but the files have {found}; {OR_REMOVE}")


def check_tokenizer(
    record: DataRecord,
    prefix: str,
    *,
    tokenizer_fingerprint: Fingerprint,
    vocab_size: int | None,
    eod_id: int | None,
    tokenizer: TokenTexts | None = None,
) -> None:
    """Checks that the data was made with the run's tokenizer. With `tokenizer`, the error names a token."""
    known = (tokenizer_fingerprint,) if isinstance(tokenizer_fingerprint, str) else tokenizer_fingerprint
    if known is not None and record.tokenizer_fingerprint not in known:
        raise DataError(
            f"{prefix}: made with another tokenizer (vocabulary {record.vocab_size}, end of document "
            f"{record.eod_id}) than the run's (vocabulary {vocab_size}, end of document {eod_id})"
            f"{difference_of(record, tokenizer)}; give the run the same tokenizer (--vocab-file and "
            "--merge-file, or --tokenizer-model), or preprocess the data again"
        )
    if vocab_size is not None and record.max_id >= vocab_size:
        raise DataError(
            f"{record_path(prefix)}: max_id {record.max_id} is not below the run's vocabulary size {vocab_size}; "
            f"use the tokenizer that the data was made with (its vocabulary: {record.vocab_size})"
        )
    if eod_id is not None and record.eod_id is not None and record.eod_id != eod_id:
        raise DataError(
            f"{prefix}: end of document is id {record.eod_id} in the data and {eod_id} in the run's tokenizer; "
            f"use the tokenizer that the data was made with"
        )
