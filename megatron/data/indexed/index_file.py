"""Reads and checks the .idx file, which locates each sequence in the .bin.

Layout, little-endian: magic (9 bytes), u64 version, u8 dtype code, u64 N sequences, u64 D = documents + 1,
int32 lengths [N], int64 byte offsets [N], int64 document array [D].
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.data.index_builders import Builders
from megatron.data.indexed.files import map_or_read
from megatron.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")

TOKEN_DTYPES: dict[int, np.dtype] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
_FLOAT_CODES = {6: "float64", 7: "float32"}
_BLOCK = 1 << 20  # entries per block, so that temporaries fit the processor's cache

AGAIN = "copy the file again, or run tools/preprocess_data.py again"


def token_dtype(vocab_size: int | None) -> np.dtype:
    """Returns the dtype of stored tokens by Megatron's rule."""
    return TOKEN_DTYPES[8] if vocab_size is not None and vocab_size < 65500 else TOKEN_DTYPES[4]


def dtype_code(dtype: np.dtype) -> int:
    for code, known in TOKEN_DTYPES.items():
        if known == dtype:
            return code
    raise DataError(
        f"token dtype {dtype}: not supported; use one of {', '.join(str(d) for d in TOKEN_DTYPES.values())}"
    )


@dataclass(frozen=True)
class Index:
    """The checked content of an .idx file; the arrays are views of the mapped file."""

    dtype: np.dtype
    lengths: np.ndarray  # int32 [N], in tokens
    offsets: np.ndarray  # int64 [N], in bytes
    documents: np.ndarray  # int64 [D], first sequence of each document, then the number of sequences


def read_index(path: Path, idx_bytes: int, bin_bytes: int) -> Index:
    """Maps the file and checks every entry; errors name the file and the field."""
    dtype, sequences, documents = _read_header(path, idx_bytes)
    if not np.little_endian:
        raise DataError(f"{path}: index files are little-endian, but this machine is not; use a little-endian machine")
    raw = map_or_read(path, idx_bytes)
    start = HEADER.size
    lengths = raw[start : start + 4 * sequences].view(np.int32)
    start += 4 * sequences
    offsets = raw[start : start + 8 * sequences].view(np.int64)
    start += 8 * sequences
    document_array = raw[start : start + 8 * documents].view(np.int64)
    total = check_sequences(path, lengths, offsets, dtype.itemsize)
    check_bin_size(path, total, dtype.itemsize, bin_bytes)
    check_documents(path, document_array, sequences)
    return Index(dtype, lengths, offsets, document_array)


def _read_header(path: Path, idx_bytes: int) -> tuple[np.dtype, int, int]:
    with open(path, "rb") as stream:
        head = stream.read(HEADER.size)
    if not head.startswith(MAGIC):
        raise DataError(f"{path}: magic is {head[:9]!r}, not an index of tokenised data; {AGAIN}")
    if len(head) < HEADER.size:
        raise DataError(f"{path}: cut off in the header ({len(head)} of {HEADER.size} bytes); {AGAIN}")
    _, version, code, sequences, documents = HEADER.unpack(head)
    if version != VERSION:
        raise DataError(
            f"{path}: version {version}, but only {VERSION} is supported; run tools/preprocess_data.py again"
        )
    if code in _FLOAT_CODES:
        raise DataError(f"{path}: dtype code {code} ({_FLOAT_CODES[code]}): tokens are integers; {AGAIN}")
    if code not in TOKEN_DTYPES:
        raise DataError(f"{path}: dtype code {code} is not one of {sorted(TOKEN_DTYPES)}; {AGAIN}")
    expected = HEADER.size + 12 * sequences + 8 * documents
    if idx_bytes == expected + sequences and sequences:
        raise DataError(f"{path}: holds sequence modes (multimodal data), which are not supported; use text data")
    if idx_bytes != expected:
        raise DataError(
            f"{path}: {idx_bytes} bytes, but its header ({sequences} sequences, document array of {documents}) "
            f"requires {expected}; {AGAIN}"
        )
    return TOKEN_DTYPES[code], sequences, documents


def _blocks(count: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, _BLOCK):
        yield start, min(start + _BLOCK, count)


def check_sequences(path: Path, lengths: np.ndarray, offsets: np.ndarray, itemsize: int) -> int:
    """Checks that lengths are not negative and that offsets are their running sum. Returns the total in bytes."""
    builders = Builders.resolve()
    if builders.helpers is not None:
        threads = builders.threads_for(len(lengths))
        total = int(builders.helpers.sequence_bytes(lengths, offsets, itemsize, threads=threads))
        if total >= 0:
            return total
    return _walk_sequences(path, lengths, offsets, itemsize)  # its error names the wrong entry


def _walk_sequences(path: Path, lengths: np.ndarray, offsets: np.ndarray, itemsize: int) -> int:
    end = 0
    for start, stop in _blocks(len(lengths)):
        block = lengths[start:stop].astype(np.int64)
        if block.min() < 0:
            bad = start + int(np.argmax(block < 0))
            raise DataError(f"{path}: sequence lengths: length of sequence {bad} is {lengths[bad]}; {AGAIN}")
        sums = np.cumsum(block * itemsize)
        expected = np.concatenate([[end], sums[:-1] + end])
        if not np.array_equal(expected, offsets[start:stop]):
            bad = int(np.argmax(expected != offsets[start:stop]))
            raise DataError(
                f"{path}: sequence pointers: sequence {start + bad} has the pointer {offsets[start + bad]}, but "
                f"the lengths before it add up to {expected[bad]} bytes; {AGAIN}"
            )
        end += int(sums[-1])
    return end


def check_bin_size(path: Path, total: int, itemsize: int, bin_bytes: int) -> None:
    if bin_bytes == total:
        return
    hint = (
        AGAIN
        if bin_bytes < total
        else "run tools/preprocess_data.py again (Megatron 23.06 writes such files with --append-eod)"
    )
    raise DataError(
        f"{path.with_suffix('.bin')}: {bin_bytes} bytes, but the sequence lengths in {path.name} add up to {total} "
        f"({total // itemsize} tokens of {itemsize} bytes); {hint}"
    )


def check_documents(path: Path, documents: np.ndarray, sequences: int) -> None:
    """Checks that the document array starts at 0, never decreases, and ends at the number of sequences."""
    if not len(documents):
        raise DataError(f"{path}: document index: empty, but it must start with 0; {AGAIN}")
    if documents[0] != 0:
        raise DataError(f"{path}: document index: starts with {documents[0]} instead of 0; {AGAIN}")
    builders = Builders.resolve()
    threads = builders.threads_for(len(documents))
    if builders.helpers is None or not builders.helpers.never_falls(documents, threads=threads):
        _walk_documents(path, documents)
    if documents[-1] != sequences:
        raise DataError(
            f"{path}: document index: ends at {documents[-1]}, but there are {sequences} sequences; {AGAIN}"
        )


def _walk_documents(path: Path, documents: np.ndarray) -> None:
    for start, stop in _blocks(len(documents) - 1):
        block = documents[start : stop + 1]
        falling = block[1:] < block[:-1]
        if falling.any():
            bad = start + 1 + int(np.argmax(falling))
            raise DataError(
                f"{path}: document index: entry {bad} is {documents[bad]}, less than {documents[bad - 1]} before it; "
                f"{AGAIN}"
            )
