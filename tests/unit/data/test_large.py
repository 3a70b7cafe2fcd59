"""Sizes beyond 32 bits, in sparse files that use a few pages of disk."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import pytest

from megatron.data.indexed.builder import IndexedDatasetBuilder
from megatron.data.indexed.checksums import BLOCK_BYTES
from megatron.data.indexed.dataset import IndexedDataset
from megatron.data.indexed.files import array_bytes
from megatron.data.indexed.growing import GrowingIndex
from megatron.data.indexed.index_file import check_documents, check_sequences
from megatron.errors import DataError
from megatron.utils.durable import BlockHasher

LONG = (1 << 31) - 1  # the longest sequence that the format holds


def write_sparse(prefix: Path, lengths: list[int], tail: list[int]) -> None:
    """Writes files as Megatron would, with a hole in place of all tokens but the `tail`; tokens in the hole are 0."""
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1)
    offsets, end = [], 0
    for length in lengths:
        offsets.append(end)
        end += 2 * length
    body = struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(lengths)}q", *offsets)
    prefix.with_suffix(".idx").write_bytes(head + body + struct.pack(f"<{len(lengths) + 1}q", *range(len(lengths) + 1)))
    with open(prefix.with_suffix(".bin"), "wb") as stream:
        os.truncate(stream.fileno(), end)
        stream.seek(end - 2 * len(tail))
        stream.write(struct.pack(f"<{len(tail)}H", *tail))


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("pieces", [3, 513])  # 513 pieces: more than 2^40 tokens
def test_tokens_past_32_bits(tmp_path: Path, mmap: bool, pieces: int) -> None:
    lengths = [LONG] * pieces + [5, 0, 3]
    try:
        write_sparse(tmp_path / "d", lengths, [1, 2, 3, 4, 5, 6, 7, 8])
    except OSError as error:
        pytest.skip(f"this file system holds no sparse file of {2 * sum(lengths)} bytes: {error}")
    data = IndexedDataset(tmp_path / "d", mmap=mmap)
    assert data.num_tokens == sum(lengths) > 1 << (40 if pieces == 513 else 32)
    assert data[pieces].tolist() == [1, 2, 3, 4, 5] and data[pieces + 2].tolist() == [6, 7, 8]
    assert data.get(pieces - 1, LONG - 3).tolist() == [0, 0, 0]
    end = data.num_tokens * 2
    assert data.document_at(end - 1) == pieces + 2 and data.document_at(end - 7) == pieces
    assert data.document_bounds(pieces, pieces + 3).tolist() == [end - 16, end - 6, end - 6, end]


def test_the_writer_counts_past_32_bits(tmp_path: Path) -> None:
    """Writes only the index of 2^40 tokens."""
    index = GrowingIndex(TemporaryFile(dir=tmp_path), TemporaryFile(dir=tmp_path))  # noqa: SIM115
    index.add(np.array([LONG] * 600 + [7], dtype=np.int32), np.ones(601, dtype=np.int32))
    content = b"".join(bytes(piece) for piece in index.index_bytes(np.dtype("<u2")))
    offsets = np.frombuffer(content, dtype="<i8", offset=34 + 4 * 601, count=601)
    assert offsets.tolist() == [2 * LONG * n for n in range(601)] and offsets[-1] > 1 << 41
    old = b"".join(bytes(piece) for piece in index.legacy_index_bytes(np.dtype("<u2")))
    elements = np.frombuffer(old, dtype="<i8", offset=56 + 8 * 602, count=602)
    assert elements.tolist() == [*(LONG * n for n in range(601)), LONG * 600 + 7]
    index.close()


def test_checks_count_past_32_bits(tmp_path: Path) -> None:
    lengths = np.full(1000, LONG, dtype=np.int32)
    offsets = np.arange(1000, dtype=np.int64) * LONG * 4
    assert check_sequences(tmp_path / "x.idx", lengths, offsets, 4) == 1000 * LONG * 4 > 1 << 40
    offsets[999] -= 1 << 32  # the result of a 32-bit sum
    with pytest.raises(DataError, match=r"sequence 999 has the pointer .*, but the lengths"):
        check_sequences(tmp_path / "x.idx", lengths, offsets, 4)


def test_documents_past_31_bits(tmp_path: Path) -> None:
    """Document arrays hold sequence numbers, so a few entries with large steps stand for 2^33 sequences."""
    documents = np.array([0, 1 << 31, (1 << 31) + 1, 1 << 33], dtype=np.int64)
    check_documents(tmp_path / "x.idx", documents, 1 << 33)
    with pytest.raises(DataError, match=f"ends at {1 << 33}, but there are {1 << 32} sequences"):
        check_documents(tmp_path / "x.idx", documents, 1 << 32)
    data = IndexedDataset.__new__(IndexedDataset)
    data.document_indices = documents
    assert [data.document_of(s) for s in (0, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, (1 << 33) - 1)] == [0, 0, 1, 2, 2]


def test_a_longer_sequence_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "d", "uint16") as builder:
        tokens = np.broadcast_to(np.uint16(1), (4,))
        with pytest.raises(
            DataError, match=rf"sequence has {LONG + 1} tokens, but the format allows 0\.\.{LONG}; split it"
        ):
            builder.add_document(tokens, [LONG + 1])
        builder.add_document([1, 2], [1, 1])  # in pieces: one document of several sequences


def test_checksums_know_sizes_past_32_bits() -> None:
    sums = BlockHasher(BLOCK_BYTES)
    sums.size = 1 << 41  # as after writing so much: a whole number of blocks
    sums.update(array_bytes(np.ones(3, dtype=np.uint8)))
    assert sums.size == (1 << 41) + 3 and len(sums.blocks()) == 1
