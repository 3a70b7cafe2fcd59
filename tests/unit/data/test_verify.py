"""Verification finds every planted damage and names its place; intact data passes."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.indexed import verify
from megatron.data.indexed.builder import IndexedDatasetBuilder
from megatron.data.indexed.checksums import checksums_of
from megatron.data.indexed.dataset import IndexedDataset
from megatron.data.indexed.record import DataRecord, make_record, write_record
from megatron.data.indexed.verify import Verified, verify_dataset
from megatron.errors import DataError

EOD, VOCABULARY, BLOCK = 9, 1000, 64
Document = list[list[int]]  # its sequences

# Documents of several sequences, empty sequences and empty documents at every place that matters
DOCUMENTS: list[Document] = [
    [],
    [[1, 2, EOD]],
    [[]],
    [[3], [], [4, 5, 6, EOD]],
    [[EOD]],
    *[[[n, n + 1, 999, EOD]] for n in range(10, 40)],
    [[7, 8, EOD], []],
    [],
]


def write(
    folder: Path, documents: list[Document] = DOCUMENTS, *, record: bool = True, impl: str = "mmap", **changed: Any
) -> tuple[str, DataRecord | None]:
    prefix = folder / "d"
    with IndexedDatasetBuilder(prefix, "uint16", impl=impl) as builder:
        for sequences in documents:
            builder.add_document([i for s in sequences for i in s], [len(s) for s in sequences])
    if not record:
        return str(prefix), None
    extra = {"append_eod": True} | changed.pop("extra", {})
    made = make_record(prefix, tokenizer_fingerprint="a", vocab_size=VOCABULARY, eod_id=EOD, max_id=999, extra=extra)
    made = dataclasses.replace(made, bin=checksums_of(Path(f"{prefix}.bin"), block_bytes=BLOCK))
    made = dataclasses.replace(made, **changed)
    write_record(prefix, made)
    return str(prefix), made


def flip(path: str, position: int, bit: int = 1) -> None:
    content = bytearray(Path(path).read_bytes())
    content[position] ^= bit
    Path(path).write_bytes(content)


@pytest.fixture(params=[4 << 20, 8, 6])
def read_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Sets the read size to the whole file, or so small that documents span several reads."""
    monkeypatch.setattr(verify, "_READ_BYTES", request.param)
    return int(request.param)


@pytest.mark.parametrize("impl", ["mmap", "lazy"])
def test_sound_data(tmp_path: Path, read_bytes: int, impl: str) -> None:
    prefix, record = write(tmp_path, impl=impl)
    told: list[tuple[int, int]] = []
    found = verify_dataset(prefix, record, on_bytes=lambda done, total: told.append((done, total)))
    size = os.path.getsize(f"{prefix}.bin")
    assert (found.bytes, found.min_id, found.max_id, found.eod_inside) == (size, 1, 999, 0)
    assert told[-1] == (size, size) and len(told) == -(-size // BLOCK)
    assert not found.not_checked and len(found.checked) == 4


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    prefix, record = write(tmp_path)
    for position in range(os.path.getsize(f"{prefix}.bin")):
        flip(f"{prefix}.bin", position)
        block = position // BLOCK
        with pytest.raises(DataError, match=rf"d\.bin: damaged: block {block}, bytes {block * BLOCK} to ") as raised:
            verify_dataset(prefix, record)
        assert "\n" not in str(raised.value)
        flip(f"{prefix}.bin", position)
    verify_dataset(prefix, record)


def test_an_error_that_is_kept_keeps_neither_threads_nor_the_file(tmp_path: Path) -> None:
    """Threads and file waited for the garbage collection, which could wait for them."""
    prefix, record = write(tmp_path)
    flip(f"{prefix}.bin", 0)
    threads, files = set(threading.enumerate()), len(os.listdir("/dev/fd"))
    with pytest.raises(DataError) as kept:
        verify_dataset(prefix, record)
    assert kept.tb is not None, "with the frames that it went through"
    assert set(threading.enumerate()) == threads and len(os.listdir("/dev/fd")) == files


def test_every_flipped_byte_of_the_index_is_found(tmp_path: Path) -> None:
    prefix, record = write(tmp_path)
    for position in range(os.path.getsize(f"{prefix}.idx")):
        flip(f"{prefix}.idx", position)
        with pytest.raises(DataError, match=r"d\.(idx|bin|meta\.json): "):
            verify_dataset(prefix, record)
        flip(f"{prefix}.idx", position)


def test_damage_names_documents_and_the_id(tmp_path: Path) -> None:
    prefix, record = write(tmp_path)
    data = IndexedDataset(prefix)
    start = int(data.document_bounds(20, 21)[0])
    flip(f"{prefix}.bin", start + 1, 0x80)
    first, last = data.document_at(start // BLOCK * BLOCK), data.document_at(start // BLOCK * BLOCK + BLOCK - 1)
    message = (
        rf"\(documents {first} to {last}\).*bytes {start} to {start + 2} \(document 20\): token id \d+, but ids must be"
    )
    with pytest.raises(DataError, match=message):
        verify_dataset(prefix, record)


def test_id_out_of_range(tmp_path: Path, read_bytes: int) -> None:
    prefix, _ = write(tmp_path, record=False)
    start = int(IndexedDataset(prefix).document_bounds(6, 7)[0]) + 4
    message = rf"d\.bin: bytes {start} to {start + 2} \(document 6\): token id 999, but ids must be 0 to 998"
    ten = int(IndexedDataset(prefix).document_bounds(5, 6)[0]) + 4
    with pytest.raises(
        DataError, match=rf"bytes {ten} to {ten + 2} \(document 5\): token id 999, but ids must be 0 to 998"
    ):
        verify_dataset(prefix, None, vocab_size=999)
    content = np.fromfile(f"{prefix}.bin", dtype="<u2")
    content[ten // 2] = 5
    content.tofile(f"{prefix}.bin")
    with pytest.raises(DataError, match=message):
        verify_dataset(prefix, None, vocab_size=999)
    assert verify_dataset(prefix, None, vocab_size=1000).max_id == 999


def test_negative_id(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "wide", "int32") as builder:
        builder.add_document([1, 2, 3])
    np.array([1, -2, 3], dtype="<i4").tofile(tmp_path / "wide.bin")
    with pytest.raises(DataError, match=r"bytes 4 to 8 \(document 0\): token id -2, but ids must be 0 or more"):
        verify_dataset(str(tmp_path / "wide"), None)


@pytest.mark.parametrize("document", [1, 3, 4, 20, 35])
def test_missing_eod(tmp_path: Path, read_bytes: int, document: int) -> None:
    documents = [[list(s) for s in d] for d in DOCUMENTS]
    last = max(i for i, s in enumerate(documents[document]) if s)
    documents[document][last][-1] = 8
    prefix, record = write(tmp_path, documents)
    stop = int(IndexedDataset(prefix).document_bounds(document, document + 1)[1])
    message = rf"bytes {stop - 2} to {stop} \(document {document}\): .*end-of-document token 9, but with 8"
    with pytest.raises(DataError, match=message):
        verify_dataset(prefix, record)


def test_no_eod_is_asked_where_none_was_appended(tmp_path: Path) -> None:
    prefix, record = write(tmp_path, [[[1, EOD, 999]]], extra={"append_eod": False})
    found = verify_dataset(prefix, record)
    assert found.eod_inside == 1 and "its record does not state --append-eod" in found.not_checked[0]


def test_eod_inside_a_document_is_counted(tmp_path: Path, read_bytes: int) -> None:
    prefix, record = write(tmp_path, [[[EOD, 1, EOD]], [[EOD], [2, 999, EOD]], [[EOD]]])
    assert verify_dataset(prefix, record).eod_inside == 2


def test_without_a_record(tmp_path: Path) -> None:
    prefix, _ = write(tmp_path, record=False)
    found = verify_dataset(prefix, None)
    assert found.checked == ["lengths and offsets"] and len(found.not_checked) == 3
    assert any("give --vocab-size or a tokenizer" in line for line in found.not_checked)
    assert verify_dataset(prefix, None, vocab_size=1000).checked[1:] == ["ids below 1000"]


def test_a_record_without_checksums(tmp_path: Path) -> None:
    prefix, record = write(tmp_path, bin=None, idx=None)
    found = verify_dataset(prefix, record)
    assert "checksums of every block: its record has none" in found.not_checked and found.max_id == 999


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_id": 998}, "max_id 998, but the largest id is 999"),
        ({"documents": 7}, "documents 7, but the files have"),
        ({"sequences": 7}, "sequences 7, but the files have"),
        ({"dtype": "int32"}, "dtype int32, but the files have uint16"),
        ({"index_fingerprint": "x"}, "the record describes other"),
        ({"vocab_size": 500}, "token id 999, but ids must be 0 to 499"),
    ],
)
def test_a_record_that_says_something_else(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    prefix, record = write(tmp_path)
    assert record is not None
    record = dataclasses.replace(record, **changed)
    with pytest.raises(DataError, match=message):
        verify_dataset(prefix, record)


def test_truncated_is_refused_at_open(tmp_path: Path) -> None:
    prefix, record = write(tmp_path)
    os.truncate(f"{prefix}.bin", 50)
    with pytest.raises(DataError, match=r"d\.bin: 50 bytes, but the sequence lengths"):
        verify_dataset(prefix, record)


def test_empty_dataset(tmp_path: Path) -> None:
    prefix, record = write(tmp_path, [], max_id=-1)
    assert verify_dataset(prefix, record) == Verified(
        checked=[
            "lengths and offsets",
            "checksums of every block",
            "ids below 1000",
            "end of document (9) at each document's end",
        ]
    )


def test_document_positions_against_plain_loops(tmp_path: Path) -> None:
    prefix, _ = write(tmp_path, record=False)
    data = IndexedDataset(prefix)
    starts, position = [], 0
    for sequences in DOCUMENTS:
        starts.append(position)
        position += 2 * sum(len(s) for s in sequences)
    starts.append(position)
    assert data.document_bounds(0, len(DOCUMENTS)).tolist() == starts
    owner = [d for d in range(len(DOCUMENTS)) for _ in range(starts[d], starts[d + 1])]
    assert [data.document_at(byte) for byte in range(position)] == owner
    for begin in range(0, position, 2):
        for end in range(begin + 2, position + 1, 2):
            first, last = data.documents_ending_in(begin, end)
            full = {d for d in range(len(DOCUMENTS)) if starts[d + 1] > starts[d] and begin < starts[d + 1] <= end}
            assert full == {d for d in range(first, last) if starts[d + 1] > starts[d]}
