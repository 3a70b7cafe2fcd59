"""The lazy and cached formats, compared with bytes put together by hand."""

from __future__ import annotations

import struct
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import pytest

from megatron.data.indexed.builder import IndexedDatasetBuilder
from megatron.data.indexed.dataset import IndexedDataset
from megatron.data.indexed.growing import GrowingIndex
from megatron.errors import DataError

DOCUMENTS = [[[3, 1], [4]], [], [[]], [[1, 5, 9, 2, 6]], [[5], [3, 5]]]
CODES = {"uint8": (1, 1), "int8": (2, 1), "int16": (3, 2), "int32": (4, 4), "int64": (5, 8), "uint16": (8, 2)}


def by_hand(documents: list[list[list[int]]], dtype: str) -> bytes:
    """Writes number by number, in the layout of Megatron's IndexedDatasetBuilder."""
    sequences = [sequence for document in documents for sequence in document]
    code, itemsize = CODES[dtype]
    dims, offsets, borders = [0], [0], [0]
    for sequence in sequences:
        dims.append(dims[-1] + 1)
        offsets.append(offsets[-1] + len(sequence))
    for document in documents:
        borders.append(borders[-1] + len(document))
    content = b"TNTIDX\x00\x00"
    content += struct.pack("<Q", 1) + struct.pack("<QQ", code, itemsize)
    content += struct.pack("<QQ", len(sequences), len(sequences)) + struct.pack("<Q", len(borders))
    for number in [*dims, *offsets, *map(len, sequences), *borders]:
        content += struct.pack("<q", number)
    return content


def write(prefix: Path, documents: list[list[list[int]]], dtype: str, impl: str) -> None:
    with IndexedDatasetBuilder(prefix, dtype, impl=impl) as builder:
        for document in documents:
            builder.add_document([i for s in document for i in s], [len(s) for s in document])


@pytest.mark.parametrize("impl", ["lazy", "cached"])
@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("documents", [DOCUMENTS, []])
def test_bytes_are_those_of_megatron(tmp_path: Path, documents: list[list[list[int]]], dtype: str, impl: str) -> None:
    write(tmp_path / "d", documents, dtype, impl)
    assert (tmp_path / "d.idx").read_bytes() == by_hand(documents, dtype)
    flat = [i for document in documents for sequence in document for i in sequence]
    assert (tmp_path / "d.bin").read_bytes() == np.array(flat, dtype=np.dtype(dtype).newbyteorder("<")).tobytes()


@pytest.mark.parametrize("mmap", [True, False])
def test_all_kinds_read_alike(tmp_path: Path, mmap: bool) -> None:
    for impl in ("lazy", "cached", "mmap"):
        write(tmp_path / impl, DOCUMENTS, "uint16", impl)
    lazy, cached, mapped = (IndexedDataset(tmp_path / impl, mmap=mmap) for impl in ("lazy", "cached", "mmap"))
    sequences = [sequence for document in DOCUMENTS for sequence in document]
    for data in (lazy, cached, mapped):
        assert [data[i].tolist() for i in range(len(data))] == sequences
        assert data.document_indices.tolist() == [0, 2, 2, 3, 4, 6]
        assert data.fingerprint == mapped.fingerprint
    assert lazy.legacy and cached.legacy and not mapped.legacy


def test_many_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.data.indexed.growing._BLOCK", 3)
    documents = [[[7] * (n % 5)] * (n % 3) for n in range(50)]
    index = GrowingIndex(TemporaryFile(dir=tmp_path), TemporaryFile(dir=tmp_path))  # noqa: SIM115
    for document in documents:
        index.add(np.array([len(s) for s in document], dtype=np.int32), np.array([len(document)], dtype=np.int32))
    index.write(tmp_path / "d.idx", np.dtype("<i4"), "lazy")
    assert (tmp_path / "d.idx").read_bytes() == by_hand(documents, "int32")
    index.close()


# ---- damage, with both ways of reading -------------------------------------------------------------------------

HEAD = 56
N = 6
TAMPERED = {
    "version 2": (8, struct.pack("<Q", 2), "version 2"),
    "dtype code 0": (16, struct.pack("<Q", 0), "dtype code 0"),
    "dtype code 99": (16, struct.pack("<Q", 99), "dtype code 99"),
    "float tokens": (16, struct.pack("<Q", 6), "dtype code 6"),
    "itemsize": (24, struct.pack("<Q", 4), "dtype code 8 with 4 bytes"),
    "count 2^40": (32, struct.pack("<Q", 1 << 40), "its header"),
    "count 2^63": (32, struct.pack("<Q", 1 << 63), "its header"),
    "sizes": (40, struct.pack("<Q", 7), "its header"),
    "document count": (48, struct.pack("<Q", 9), "its header"),
    "two dimensions": (HEAD + 8, struct.pack("<q", 2), "dim_offsets"),
    "overlapping": (HEAD + 8 * (N + 1) + 8 * 4, struct.pack("<q", 2), "sequence pointers: sequence 4"),
    "out of range": (HEAD + 8 * (N + 1) + 8 * 5, struct.pack("<q", 1 << 50), "sequence pointers: sequence 5"),
    "end": (HEAD + 8 * (N + 1) + 8 * 6, struct.pack("<q", 12), "data_offsets: ends at 12"),
    "negative length": (HEAD + 16 * (N + 1), struct.pack("<q", -2), "sizes: a length is outside"),
    "long length": (HEAD + 16 * (N + 1), struct.pack("<q", 1 << 31), "sizes: a length is outside"),
    "document start": (HEAD + 16 * (N + 1) + 8 * N, struct.pack("<q", 1), "document index: starts with 1"),
    "falling": (
        HEAD + 16 * (N + 1) + 8 * N + 16,
        struct.pack("<q", 1),
        "document index: entry 2 is 1, less than 2 before it",
    ),
    "too few": (HEAD + 16 * (N + 1) + 8 * N + 40, struct.pack("<q", 5), "document index: ends at 5, but there are 6"),
}


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("case", TAMPERED)
def test_tampered_index_is_refused(tmp_path: Path, case: str, mmap: bool) -> None:
    write(tmp_path / "d", DOCUMENTS, "uint16", "lazy")
    offset, data, message = TAMPERED[case]
    content = bytearray((tmp_path / "d.idx").read_bytes())
    content[offset : offset + len(data)] = data
    (tmp_path / "d.idx").write_bytes(content)
    with pytest.raises(DataError, match=message) as raised:
        IndexedDataset(tmp_path / "d", mmap=mmap)
    assert "d.idx" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("size", [0, 11, 20, 24])
def test_bin_of_the_wrong_size_is_refused(tmp_path: Path, size: int, mmap: bool) -> None:
    write(tmp_path / "d", DOCUMENTS, "uint16", "lazy")
    (tmp_path / "d.bin").write_bytes(((tmp_path / "d.bin").read_bytes() + b"\0\0")[:size])
    with pytest.raises(DataError, match=rf"d\.bin: {size} bytes, .*add up to 22"):
        IndexedDataset(tmp_path / "d", mmap=mmap)


@pytest.mark.parametrize("token", [0, 2])
def test_an_offset_that_overflows_to_the_right_one_is_refused(tmp_path: Path, token: int) -> None:
    """2**63 more tokens overflow to the same 64-bit byte offset."""
    write(tmp_path / "d", DOCUMENTS, "uint16", "lazy")
    idx = tmp_path / "d.idx"
    content = bytearray(idx.read_bytes())
    items = len([sequence for document in DOCUMENTS for sequence in document])
    top = 56 + 8 * (items + 1) + 8 * token + 7
    content[top] ^= 0x80
    idx.write_bytes(content)
    with pytest.raises(DataError, match="data_offsets: an offset is outside"):
        IndexedDataset(tmp_path / "d")
