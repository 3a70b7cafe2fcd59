"""Reads the older index format (TNTIDX) of Megatron's lazy and cached datasets.

Layout, little-endian: magic (8 bytes), u64 version, dtype code, bytes per token, N items, S sizes, D = documents + 1.
Then follow int64 dim_offsets [N + 1], data_offsets [N + 1] in tokens, sizes [S], document array [D].
"""

import struct
from pathlib import Path

import numpy as np

from megatron.data.indexed.index_file import (
    AGAIN,
    LEGACY_MAGIC,
    TOKEN_DTYPES,
    Index,
    check_bin_size,
    check_documents,
    check_sequences,
)
from megatron.errors import DataError

HEADER = struct.Struct("<8sQQQQQQ")  # magic, version, dtype code, itemsize, N, S sizes, D
_INT32_MAX = np.iinfo(np.int32).max
_INT64_MAX = np.iinfo(np.int64).max


def read_legacy_index(path: Path, idx_bytes: int, bin_bytes: int) -> Index:
    """Reads an index of one-dimensional items: dim_offsets must be 0, 1, 2, ..."""
    with open(path, "rb") as stream:
        head = stream.read(HEADER.size)
    if len(head) < HEADER.size:
        raise DataError(f"{path}: cut off in the header ({len(head)} of {HEADER.size} bytes); {AGAIN}")
    magic, version, code, itemsize, items, sizes, documents = HEADER.unpack(head)
    assert magic == LEGACY_MAGIC
    if version != 1:
        raise DataError(f"{path}: version {version}, but only 1 is supported; run tools/preprocess_data.py again")
    if code not in TOKEN_DTYPES or TOKEN_DTYPES[code].itemsize != itemsize:
        raise DataError(f"{path}: dtype code {code} with {itemsize} bytes per token is not an integer type; {AGAIN}")
    expected = HEADER.size + 8 * (2 * (items + 1) + sizes + documents)
    if idx_bytes != expected:
        raise DataError(
            f"{path}: {idx_bytes} bytes, but its header ({items} items, {sizes} sizes, document array of {documents}) "
            f"requires {expected}; {AGAIN}"
        )
    arrays = np.fromfile(path, dtype="<i8", offset=HEADER.size)
    dims, offsets, lengths, document_array = np.split(arrays, np.cumsum([items + 1, items + 1, sizes]))
    if sizes != items or not np.array_equal(dims, np.arange(items + 1)):
        raise DataError(
            f"{path}: dim_offsets: items are not all one-dimensional; only sequences of tokens are supported"
        )
    if items and (lengths.min() < 0 or lengths.max() > _INT32_MAX):
        raise DataError(f"{path}: sizes: a length is outside 0..{_INT32_MAX}; {AGAIN}")
    furthest = _INT64_MAX // itemsize  # checked first: byte offsets that overflow could pass the comparison
    if offsets.min() < 0 or offsets.max() > furthest:
        raise DataError(f"{path}: data_offsets: an offset is outside 0..{furthest}; {AGAIN}")
    dtype = TOKEN_DTYPES[code]
    short = lengths.astype(np.int32)
    byte_offsets = offsets[:-1] * dtype.itemsize
    total = check_sequences(path, short, byte_offsets, dtype.itemsize)
    if offsets[-1] * dtype.itemsize != total:
        raise DataError(
            f"{path}: data_offsets: ends at {offsets[-1]}, but the sizes add up to {total // itemsize}; {AGAIN}"
        )
    check_bin_size(path, total, dtype.itemsize, bin_bytes)
    check_documents(path, document_array, items)
    return Index(dtype, short, byte_offsets, document_array)
