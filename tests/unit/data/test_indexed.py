"""The .bin/.idx format, byte for byte; damaged files are never opened."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.data.indexed import files
from megatron.data.indexed.builder import IndexedDatasetBuilder
from megatron.data.indexed.dataset import IndexedDataset
from megatron.data.indexed.index_file import token_dtype
from megatron.errors import ConfigError, DataError, MegatronError

# PREFIX.idx as written by Megatron-LM's own builder (core 0.16.1) for documents of 3, 0, 7, 2, 5 and 1 tokens, uint16
MEGATRON_IDX = bytes.fromhex(
    "4d4d4944494458000001000000000000000806000000000000000700000000000000"
    "030000000000000007000000020000000500000001000000"
    "000000000000000006000000000000000600000000000000140000000000000018000000000000002200000000000000"
    "0000000000000000010000000000000002000000000000000300000000000000"
    "040000000000000005000000000000000600000000000000"
)
LENGTHS = [3, 0, 7, 2, 5, 1]


def write_golden(prefix: Path) -> None:
    with IndexedDatasetBuilder(prefix, "uint16") as builder:
        start = 0
        for length in LENGTHS:
            builder.add_document(list(range(start, start + length)))
            start += length


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    write_golden(tmp_path / "golden")
    return tmp_path / "golden"


def patch(path: Path, offset: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(bytes(content))


def test_bytes_are_those_of_megatron(golden: Path) -> None:
    assert golden.with_suffix(".idx").read_bytes() == MEGATRON_IDX
    assert golden.with_suffix(".bin").read_bytes() == np.arange(18, dtype="<u2").tobytes()


@pytest.mark.parametrize("mmap", [True, False])
def test_reading(golden: Path, mmap: bool) -> None:
    data = IndexedDataset(golden, mmap=mmap)
    assert (len(data), data.num_documents, data.num_tokens, data.dtype) == (6, 6, 18, np.uint16)
    assert data.sequence_lengths.tolist() == LENGTHS
    assert data.document_indices.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert [data[i].tolist() for i in range(4)] == [[0, 1, 2], [], [3, 4, 5, 6, 7, 8, 9], [10, 11]]
    assert data.get(2, 2).tolist() == [5, 6, 7, 8, 9]
    assert data.get(2, 2, 3).tolist() == [5, 6, 7]
    assert data.get(2, 7, 0).tolist() == []
    for sequence, offset, length in ((6, 0, 1), (-1, 0, 1), (2, 0, 8), (2, 8, None), (2, -1, 2), (2, 1, -1)):
        with pytest.raises(IndexError):
            data.get(sequence, offset, length)


@pytest.mark.parametrize("mmap", [True, False])
def test_pickle_reopens_the_files(golden: Path, mmap: bool) -> None:
    packed = pickle.dumps(IndexedDataset(golden, mmap=mmap))
    assert len(packed) < 500  # names, not tokens
    again = pickle.loads(packed)
    assert again.mmap == mmap and again[2].tolist() == list(range(3, 10))


@pytest.mark.parametrize("mmap", [True, False])
def test_empty_dataset(tmp_path: Path, mmap: bool) -> None:
    with IndexedDatasetBuilder(tmp_path / "none", "int32"):
        pass
    data = IndexedDataset(tmp_path / "none", mmap=mmap)
    assert len(data) == data.num_documents == data.num_tokens == 0
    assert data.fingerprint


def test_token_dtype_rule() -> None:
    assert [token_dtype(size).name for size in (1, 65499, 65500, 200000)] == ["uint16", "uint16", "int32", "int32"]
    assert token_dtype(None) == np.int32


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_every_token_dtype(tmp_path: Path, dtype: str) -> None:
    with IndexedDatasetBuilder(tmp_path / dtype, dtype) as builder:
        builder.add_document([1, 2, 3, 100])
    data = IndexedDataset(tmp_path / dtype)
    assert data.dtype == np.dtype(dtype) and data[0].tolist() == [1, 2, 3, 100]


def test_documents_of_several_sequences(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "s", "uint16") as builder:
        builder.add_document([1, 2, 3], [1, 2])
        builder.add_document([], [])
        builder.add_document([4], [0, 1])
    data = IndexedDataset(tmp_path / "s")
    assert data.sequence_lengths.tolist() == [1, 2, 0, 1]
    assert data.document_indices.tolist() == [0, 2, 2, 4]
    assert [data.document_of(i) for i in range(4)] == [0, 0, 2, 2]


def test_large_indices_are_mapped(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = IndexedDataset(golden)
    monkeypatch.setattr(files, "_SMALL", 10)
    mapped = IndexedDataset(golden)
    assert not mapped.sequence_lengths.flags.writeable and mapped.fingerprint == read.fingerprint
    assert [mapped[i].tolist() for i in range(6)] == [read[i].tolist() for i in range(6)]


# ---- damage: refused at open, with the file and the field -----------------------------------------------------

N, D = 6, 7
LENGTHS_AT, OFFSETS_AT, DOCUMENTS_AT = 34, 34 + 4 * N, 34 + 12 * N

TAMPERED = {
    "magic": (0, b"X", r"\.idx: magic"),
    "version": (9, struct.pack("<Q", 2), r"\.idx: version 2"),
    "dtype code 0": (17, b"\x00", r"\.idx: dtype code 0"),
    "dtype code 99": (17, b"\x63", r"\.idx: dtype code 99"),
    "float tokens": (17, b"\x06", r"\.idx: dtype code 6 \(float64\)"),
    "count 2^40": (18, struct.pack("<Q", 1 << 40), r"\.idx: .* header"),
    "count 2^63": (18, struct.pack("<Q", 1 << 63), r"\.idx: .* header"),
    "document count": (26, struct.pack("<Q", 8), r"\.idx: .* header"),
    "negative length": (LENGTHS_AT + 8, struct.pack("<i", -7), r"sequence lengths: length of sequence 2 is -7"),
    "overlapping": (OFFSETS_AT + 16, struct.pack("<q", 4), r"sequence pointers: sequence 2"),
    "misaligned": (OFFSETS_AT + 16, struct.pack("<q", 7), r"sequence pointers: sequence 2"),
    "out of range": (OFFSETS_AT + 40, struct.pack("<q", 1 << 50), r"sequence pointers: sequence 5"),
    "lengths redistributed": (LENGTHS_AT, struct.pack("<ii", 2, 1), r"sequence pointers: sequence 1"),
    "document start": (DOCUMENTS_AT, struct.pack("<q", 1), r"document index: starts with 1"),
    "documents not monotone": (
        DOCUMENTS_AT + 16,
        struct.pack("<q", 0),
        r"document index: entry 2 is 0, less than 1 before it",
    ),
    "documents too few": (DOCUMENTS_AT + 48, struct.pack("<q", 5), r"document index: ends at 5, but there are 6"),
    "documents too many": (DOCUMENTS_AT + 48, struct.pack("<q", 9), r"document index: ends at 9, but there are 6"),
}


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("case", TAMPERED)
def test_tampered_index_is_refused(golden: Path, case: str, mmap: bool) -> None:
    offset, data, message = TAMPERED[case]
    patch(golden.with_suffix(".idx"), offset, data)
    with pytest.raises(DataError, match=message):
        IndexedDataset(golden, mmap=mmap)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("size", [0, 17, 18, 34, 38])
def test_bin_of_the_wrong_size_is_refused(golden: Path, size: int, mmap: bool) -> None:
    content = golden.with_suffix(".bin").read_bytes()
    golden.with_suffix(".bin").write_bytes((content + b"\0\0")[:size])
    with pytest.raises(DataError, match=rf"\.bin: {size} bytes, .*add up to 36"):
        IndexedDataset(golden, mmap=mmap)


def test_index_cut_at_every_byte_is_refused(golden: Path) -> None:
    for size in range(len(MEGATRON_IDX)):
        golden.with_suffix(".idx").write_bytes(MEGATRON_IDX[:size])
        with pytest.raises(DataError, match=r"golden.idx"):
            IndexedDataset(golden)


def test_multimodal_index_is_refused_by_name(golden: Path) -> None:
    golden.with_suffix(".idx").write_bytes(MEGATRON_IDX + bytes(N))
    with pytest.raises(DataError, match="sequence modes"):
        IndexedDataset(golden)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, len(MEGATRON_IDX) - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_is_refused_or_changes_the_fingerprint(golden: Path, position: int, bit: int) -> None:
    golden.with_suffix(".idx").write_bytes(MEGATRON_IDX)
    sound = IndexedDataset(golden).fingerprint
    patch(golden.with_suffix(".idx"), position, bytes([MEGATRON_IDX[position] ^ (1 << bit)]))
    try:
        assert IndexedDataset(golden).fingerprint != sound
    except DataError as error:
        assert "golden." in str(error) and "\n" not in str(error)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("kind", ["fifo", "zero", "directory"])
def test_what_is_not_a_file_is_refused_at_once(golden: Path, suffix: str, kind: str) -> None:
    path = golden.with_suffix(suffix)
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(DataError, match="not a regular file"):
        IndexedDataset(golden)


def test_missing_files_name_what_was_meant(golden: Path) -> None:
    with pytest.raises(ConfigError, match=r"gold.idx does not exist; give the prefix"):
        IndexedDataset(golden.with_name("gold"))
    with pytest.raises(ConfigError, match=r"without its suffix: .*golden$"):
        IndexedDataset(f"{golden}.bin")
    golden.with_suffix(".bin").rename(golden.with_name("golden_text_document.bin"))
    golden.with_suffix(".idx").rename(golden.with_name("golden_text_document.idx"))
    with pytest.raises(ConfigError, match=r"did you mean .*golden_text_document"):
        IndexedDataset(golden)
    golden.with_name("golden.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match=r"did you mean .*golden_text_document\?$"):
        IndexedDataset(f"{golden}.jsonl")
    golden.with_name("other.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match=r"convert it: python tools/preprocess_data.py --input .*other.jsonl"):
        IndexedDataset(golden.with_name("other.jsonl"))
    golden.with_name("plain").write_text("Some text.\n")
    steps = (
        r"convert it: python -X utf8 -c .* > .*plain.jsonl && python tools/preprocess_data.py --input .*plain.jsonl$"
    )
    with pytest.raises(ConfigError, match=steps):
        IndexedDataset(golden.with_name("plain"))
    golden.with_name("golden_text_document.bin").unlink()
    with pytest.raises(ConfigError, match=r"golden_text_document.bin does not exist"):
        IndexedDataset(golden.with_name("golden_text_document"))
    broken = golden.with_name("broken")
    broken.with_suffix(".idx").symlink_to("nowhere")
    broken.with_suffix(".bin").symlink_to("nowhere")
    with pytest.raises(MegatronError, match=r"broken.idx does not exist"):
        IndexedDataset(broken)


def test_pread_of_a_file_cut_while_in_use(golden: Path) -> None:
    data = IndexedDataset(golden, mmap=False)
    os.truncate(golden.with_suffix(".bin"), 10)
    with pytest.raises(DataError, match="truncated while in use"):
        data.get(2)


# ---- the lazy and cached kinds --------------------------------------------------------------------------------


def write_legacy(prefix: Path, dtype_code: int = 4, itemsize: int = 4, **changed: list[int]) -> None:
    arrays = {
        "dims": list(range(N + 1)),
        "offsets": [0, 3, 3, 10, 12, 17, 18],
        "sizes": LENGTHS,
        "documents": list(range(N + 1)),
    } | changed
    head = b"TNTIDX\0\0" + struct.pack(
        "<QQQQQQ", 1, dtype_code, itemsize, N, len(arrays["sizes"]), len(arrays["documents"])
    )
    body = b"".join(np.array(arrays[name], dtype="<i8").tobytes() for name in ("dims", "offsets", "sizes", "documents"))
    prefix.with_suffix(".idx").write_bytes(head + body)
    prefix.with_suffix(".bin").write_bytes(np.arange(18, dtype="<i4").tobytes())


@pytest.mark.parametrize("mmap", [True, False])
def test_legacy_index_is_read(tmp_path: Path, mmap: bool) -> None:
    write_legacy(tmp_path / "old")
    data = IndexedDataset(tmp_path / "old", mmap=mmap)
    assert data.dtype == np.int32 and data.sequence_lengths.tolist() == LENGTHS
    assert data[2].tolist() == list(range(3, 10)) and data[5].tolist() == [17]
    assert pickle.loads(pickle.dumps(data))[3].tolist() == [10, 11]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dims": [0, 1, 3, 3, 4, 5, 6]}, "dim_offsets"),
        ({"offsets": [0, 3, 3, 10, 13, 17, 18]}, "sequence pointers"),
        ({"offsets": [0, 3, 3, 10, 12, 17, 19]}, "data_offsets"),
        ({"sizes": [3, 0, 7, 2, 5, -1]}, "sizes: a length"),
        ({"sizes": [3, 0, 7, 2, 5, 2]}, "data_offsets|add up"),
        ({"documents": [0, 2, 1, 3, 4, 5, 6]}, "document index"),
    ],
)
def test_damaged_legacy_index_is_refused(tmp_path: Path, changed: dict[str, list[int]], message: str) -> None:
    write_legacy(tmp_path / "old", **changed)
    with pytest.raises(DataError, match=message):
        IndexedDataset(tmp_path / "old")


def test_legacy_header_is_checked(tmp_path: Path) -> None:
    write_legacy(tmp_path / "old", dtype_code=4, itemsize=8)
    with pytest.raises(DataError, match="dtype code 4 with 8 bytes"):
        IndexedDataset(tmp_path / "old")
    write_legacy(tmp_path / "old")
    content = (tmp_path / "old.idx").read_bytes()
    for size in range(8, len(content)):
        (tmp_path / "old.idx").write_bytes(content[:size])
        with pytest.raises(DataError, match=r"old.idx"):
            IndexedDataset(tmp_path / "old")
