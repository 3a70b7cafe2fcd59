"""Checksums of files in blocks, against hashlib over slices."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed.checksums import FileChecksums, checksums_of, verify_blocks
from megatron.errors import DataError
from megatron.utils.typed import json_value, typed

BLOCK = 1000
SIZES = [0, 1, 999, 1000, 1001, 2000, 25_300]


def random_bytes(size: int) -> bytes:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()


def oracle(content: bytes) -> list[str]:
    return [hashlib.sha256(content[at : at + BLOCK]).hexdigest() for at in range(0, len(content), BLOCK)]


@pytest.mark.parametrize("size", SIZES)
def test_of_a_file(tmp_path: Path, size: int) -> None:
    path = tmp_path / "f"
    path.write_bytes(random_bytes(size))
    found = checksums_of(path, block_bytes=BLOCK)
    assert (found.size, list(found.blocks)) == (size, oracle(random_bytes(size)))
    assert typed(FileChecksums, json_value(found)) == found
    verify_blocks(path, found)


@pytest.mark.parametrize("position", [0, 999, 1000, 24_999, 25_299])
def test_a_flipped_bit_has_an_address(tmp_path: Path, position: int) -> None:
    path = tmp_path / "f"
    content = bytearray(random_bytes(25_300))
    path.write_bytes(content)
    sound = checksums_of(path, block_bytes=BLOCK)
    content[position] ^= 4
    path.write_bytes(content)
    block = position // BLOCK
    start, stop = block * BLOCK, min(25_300, (block + 1) * BLOCK)
    with pytest.raises(DataError, match=rf"f: damaged: block {block}, bytes {start} to {stop}, ") as raised:
        verify_blocks(path, sound)
    assert "\n" not in str(raised.value)


def test_the_first_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(5000))
    sound = checksums_of(path, block_bytes=BLOCK)
    path.write_bytes(b"\1" * 5000)
    with pytest.raises(DataError, match="block 0, bytes 0 to 1000"):
        verify_blocks(path, sound)


def test_another_size(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(5000))
    sound = checksums_of(path, block_bytes=BLOCK)
    os.truncate(path, 4999)
    with pytest.raises(DataError, match="4999 bytes, but 5000 were written"):
        verify_blocks(path, sound)
