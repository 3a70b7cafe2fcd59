from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest

from megatron.data.indexed.checksums import FileChecksums
from megatron.data.indexed.dataset import IndexedDataset
from megatron.data.indexed.record import (
    DataRecord,
    check_files,
    check_tokenizer,
    make_record,
    read_record,
    record_path,
    write_record,
)
from megatron.errors import DataError
from tests.unit.data.oracle import write_dataset


def make(tmp_path: Path) -> tuple[str, DataRecord]:
    prefix = write_dataset(tmp_path / "d", [[1, 2, 3], [4, 9]])
    record = make_record(
        prefix,
        tokenizer_fingerprint="abc",
        vocab_size=10,
        eod_id=9,
        max_id=9,
        source=("corpus.json",),
        extra={"x": [1]},
    )
    write_record(prefix, record)
    return prefix, record


def check(prefix: str, record: DataRecord, **changed: object) -> None:
    run = {"tokenizer_fingerprint": "abc", "vocab_size": 10, "eod_id": 9} | changed
    data = IndexedDataset(prefix)
    check_files(record, data, data.fingerprint)
    check_tokenizer(record, prefix, **run)  # type: ignore[arg-type]


def test_round_trip(tmp_path: Path) -> None:
    prefix, record = make(tmp_path)
    assert read_record(prefix) == record
    assert (record.documents, record.sequences, record.tokens, record.dtype) == (2, 2, 5, "uint16")
    assert record_path(prefix) == tmp_path / "d.meta.json"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.bin", "d.idx", "d.meta.json"]
    check(prefix, record)


def test_absent(tmp_path: Path) -> None:
    assert read_record(tmp_path / "nothing") is None


def test_other_tokenizer(tmp_path: Path) -> None:
    prefix, record = make(tmp_path)
    with pytest.raises(DataError, match=r"made with another tokenizer .*same tokenizer \(--vocab-file"):
        check(prefix, record, tokenizer_fingerprint="xyz")
    with pytest.raises(DataError, match="end of document is id 9 in the data and 3"):
        check(prefix, record, eod_id=3)
    with pytest.raises(DataError, match=r"max_id 9 is not below .* 9"):
        check(prefix, record, vocab_size=9, tokenizer_fingerprint=None)
    check(prefix, record, tokenizer_fingerprint=None, vocab_size=None, eod_id=None)


def test_record_of_other_files(tmp_path: Path) -> None:
    prefix, record = make(tmp_path)
    Path(f"{prefix}.bin").unlink()
    Path(f"{prefix}.idx").unlink()
    write_dataset(tmp_path / "d", [[1, 2], [3, 4, 9]])  # as many tokens, another tool that knows of no record
    with pytest.raises(DataError, match=r"other .bin/.idx files"):
        check(prefix, record)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not readable as JSON"),
        (b"\xff", "not readable as JSON"),
        (b"[" * 100000, "not readable as JSON"),
        (b"[]", "format"),
        (b"{}", "format"),
    ],
)
def test_damaged(tmp_path: Path, content: bytes, message: str) -> None:
    record_path(tmp_path / "d").write_bytes(content)
    with pytest.raises(DataError, match=rf"d\.meta\.json: {message}"):
        read_record(tmp_path / "d")


OPTIONAL = ("extra", "bin", "idx", "tool_version")
NEEDED = [field.name for field in dataclasses.fields(DataRecord) if field.name not in OPTIONAL]


@pytest.mark.parametrize("name", NEEDED)
def test_every_field_is_needed_and_of_its_kind(tmp_path: Path, name: str) -> None:
    prefix, _ = make(tmp_path)
    content = json.loads(record_path(prefix).read_text())
    record_path(prefix).write_text(json.dumps({key: value for key, value in content.items() if key != name}))
    with pytest.raises(DataError, match=f"{name} is missing"):
        read_record(prefix)
    record_path(prefix).write_text(json.dumps(content | {name: 1.5}))
    with pytest.raises(DataError, match=rf"{name} is float, not "):
        read_record(prefix)


def test_other_version(tmp_path: Path) -> None:
    prefix, _ = make(tmp_path)
    content = json.loads(record_path(prefix).read_text())
    record_path(prefix).write_text(json.dumps(content | {"version": 2}))
    with pytest.raises(DataError, match="version 2, but only 1 is supported"):
        read_record(prefix)


# ---- checksums ------------------------------------------------------------------------------------------------


def test_checksums_are_those_of_the_files(tmp_path: Path) -> None:
    prefix, record = make(tmp_path)
    for suffix, known in record.files.items():
        content = Path(f"{prefix}.{suffix}").read_bytes()
        assert (known.size, list(known.blocks)) == (len(content), [hashlib.sha256(content).hexdigest()])
    written = json.loads(record_path(prefix).read_text())
    assert written["checksums"]["bin"]["block_bytes"] == 64 << 20 and written["tool_version"]


def test_checksums_given_are_not_computed_again(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", [[1, 2, 3]])
    given = FileChecksums(size=6, blocks=("0" * 64,))
    record = make_record(prefix, tokenizer_fingerprint="a", vocab_size=4, eod_id=None, max_id=3, bin_checksums=given)
    assert record.bin == given


def test_a_record_without_checksums_is_read(tmp_path: Path) -> None:
    prefix, record = make(tmp_path)
    content = json.loads(record_path(prefix).read_text())
    del content["checksums"], content["tool_version"]
    record_path(prefix).write_text(json.dumps(content))
    assert read_record(prefix) == dataclasses.replace(record, bin=None, idx=None, tool_version=None)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"algorithm": "md5"}, "algorithm 'md5'; only sha256"),
        ({"size": -1}, "size -1"),
        ({"block_bytes": 0}, "block_bytes 0 is impossible"),
        ({"block_bytes": 12}, "block_bytes 12 is impossible"),
        ({"block_bytes": 8}, "1 checksums, but 10 bytes in blocks of 8 bytes have 2"),
        ({"blocks": []}, "0 checksums"),
        ({"blocks": ["x"]}, "not a checksum"),
        ({"blocks": [1]}, "blocks is int, not str"),
        ({"size": "1"}, "size is str, not int"),
    ],
)
def test_damaged_checksums_are_refused(tmp_path: Path, changed: dict[str, object], message: str) -> None:
    prefix, _ = make(tmp_path)
    content = json.loads(record_path(prefix).read_text())
    content["checksums"]["bin"] |= changed
    record_path(prefix).write_text(json.dumps(content))
    with pytest.raises(DataError, match=f"checksums: bin: .*{message}"):
        read_record(prefix)


@pytest.mark.parametrize("value", [[], {"bin": 1}])
def test_checksums_of_another_kind_are_refused(tmp_path: Path, value: object) -> None:
    prefix, _ = make(tmp_path)
    content = json.loads(record_path(prefix).read_text())
    record_path(prefix).write_text(json.dumps(content | {"checksums": value}))
    with pytest.raises(DataError, match=r"checksums: .*not an object"):
        read_record(prefix)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("documents", -1), ("sequences", -5), ("tokens", -(10**30)), ("vocab_size", 0), ("vocab_size", -3)],
        *[("max_id", 10), ("max_id", -2), ("max_id", 10**30), ("eod_id", 10), ("eod_id", -1)],
    ],
)
def test_an_impossible_number_is_refused(tmp_path: Path, name: str, value: int) -> None:
    prefix, _ = make(tmp_path)
    content = json.loads(record_path(prefix).read_text())
    record_path(prefix).write_text(json.dumps(content | {name: value}))
    with pytest.raises(DataError, match=rf"d\.meta\.json: (max_id|{name}): "):
        read_record(prefix)


@pytest.mark.parametrize("changes", [{"documents": 3}, {"sequences": 10**12}, {"dtype": "int32"}])
def test_numbers_of_other_files_are_refused(tmp_path: Path, changes: dict[str, int | str]) -> None:
    prefix, record = make(tmp_path)
    name, said = next(iter(changes.items()))
    with pytest.raises(DataError, match=rf"d\.meta\.json: {name} {said}, but the files have"):
        check(prefix, dataclasses.replace(record, **changes))  # type: ignore[arg-type]
