"""The older index format (TNTIDX) of Megatron's lazy and cached datasets.

Layout, little-endian: magic (8 bytes), u64 version, dtype code, bytes per token, N items, S sizes, D = documents + 1,
int64 dim_offsets [N + 1], data_offsets [N + 1] in tokens, sizes [S], document array [D].
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from megatron.data.indexed.index_file import (
    AGAIN,
    LEGACY_MAGIC,
    TOKEN_DTYPES,
    VERSION,
    Index,
    check_bin_size,
    check_documents,
    check_sequences,
    dtype_code,
)
from megatron.errors import DataError
from megatron.utils.durable import write_synced

_HEADER = struct.Struct("<8sQQQQQQ")  # magic, version, dtype code, itemsize, N, S sizes, D
_INT32_MAX = np.iinfo(np.int32).max
_INT64_MAX = np.iinfo(np.int64).max
_BLOCK = 1 << 20  # entries per block


class Lengths(Protocol):
    """The content of an index, in blocks, such as `growing.GrowingIndex`."""

    @property
    def sequences(self) -> int: ...
    @property
    def documents(self) -> int: ...
    def lengths(self) -> Iterator[np.ndarray]: ...
    def document_array(self) -> Iterator[np.ndarray]: ...


def write_legacy_index(path: Path, dtype: np.dtype, content: Lengths) -> None:
    write_synced(path, legacy_index_bytes(dtype, content))


def legacy_index_bytes(dtype: np.dtype, content: Lengths) -> Iterator[bytes]:
    """The content of the .idx file. Each sequence is an item of one dimension."""
    items = content.sequences
    yield _HEADER.pack(LEGACY_MAGIC, VERSION, dtype_code(dtype), dtype.itemsize, items, items, content.documents + 1)
    for start in range(0, items + 1, _BLOCK):
        yield np.arange(start, min(start + _BLOCK, items + 1), dtype="<i8").tobytes()
    yield np.zeros(1, dtype="<i8").tobytes()
    end = 0
    for lengths in content.lengths():
        sums = np.cumsum(lengths, dtype=np.int64) + end
        end = int(sums[-1])
        yield sums.astype("<i8").tobytes()
    for lengths in content.lengths():
        yield lengths.astype("<i8").tobytes()
    for block in content.document_array():
        yield block.astype("<i8").tobytes()


def read_legacy_index(path: Path, idx_bytes: int, bin_bytes: int) -> Index:
    """Reads an index of one-dimensional items: dim_offsets must be 0, 1, 2, ..."""
    with open(path, "rb") as stream:
        head = stream.read(_HEADER.size)
    if len(head) < _HEADER.size:
        raise DataError(f"{path}: cut off in the header ({len(head)} of {_HEADER.size} bytes); {AGAIN}")
    magic, version, code, itemsize, items, sizes, documents = _HEADER.unpack(head)
    assert magic == LEGACY_MAGIC
    if version != 1:
        raise DataError(f"{path}: version {version}, and only 1 is known; write it with another tool")
    if code not in TOKEN_DTYPES or TOKEN_DTYPES[code].itemsize != itemsize:
        raise DataError(f"{path}: dtype code {code} with {itemsize} bytes a token is not a kind of integer; {AGAIN}")
    expected = _HEADER.size + 8 * (2 * (items + 1) + sizes + documents)
    if idx_bytes != expected:
        raise DataError(
            f"{path}: {idx_bytes} bytes, but its counts (items {items}, sizes {sizes}, document array {documents}) "
            f"need {expected}; {AGAIN}"
        )
    arrays = np.fromfile(path, dtype="<i8", offset=_HEADER.size)
    dims, offsets, lengths, document_array = np.split(arrays, np.cumsum([items + 1, items + 1, sizes]))
    if sizes != items or not np.array_equal(dims, np.arange(items + 1)):
        raise DataError(f"{path}: dim_offsets: items are not all one-dimensional; only token sequences are read")
    if items and (lengths.min() < 0 or lengths.max() > _INT32_MAX):
        raise DataError(f"{path}: sizes: a length is outside 0..{_INT32_MAX}; {AGAIN}")
    furthest = _INT64_MAX // itemsize  # check in bytes first: an overflow could pass the comparison
    if offsets.min() < 0 or offsets.max() > furthest:
        raise DataError(f"{path}: data_offsets: an offset is outside 0..{furthest}; {AGAIN}")
    dtype = TOKEN_DTYPES[code]
    short = lengths.astype(np.int32)
    byte_offsets = offsets[:-1] * dtype.itemsize
    total = check_sequences(path, short, byte_offsets, dtype.itemsize)
    if offsets[-1] * dtype.itemsize != total:
        raise DataError(
            f"{path}: data_offsets: ends at {offsets[-1]}, the sizes add up to {total // itemsize}; {AGAIN}"
        )
    check_bin_size(path, total, dtype.itemsize, bin_bytes)
    check_documents(path, document_array, items)
    return Index(dtype, short, byte_offsets, document_array)
