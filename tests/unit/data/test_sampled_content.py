"""Machines compare their data by a sample of the content: it is cheap, and detects another file of the same size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.config.sections.data import DataConfig
from megatron.data import sources
from megatron.data.indexed.dataset import SAMPLED_BYTES, IndexedDataset
from megatron.data.sources import Sources
from tests.unit.data.oracle import random_documents, write_dataset


def sampled(prefix: Path, blocks: int = 16) -> str:
    return IndexedDataset(prefix).sampled(blocks)


@pytest.mark.parametrize("place", [0, 0.5, 1], ids=["first", "middle", "last"])
def test_one_other_token_shows_where_a_block_is_read(tmp_path: Path, place: float) -> None:
    prefix = tmp_path / "a"
    write_dataset(prefix, random_documents(0, 2000, 300))
    tokens = np.fromfile(f"{prefix}.bin", dtype=np.uint16)
    before = sampled(prefix, 3)
    assert sampled(prefix, 3) == before
    tokens[int(place * (len(tokens) - 1))] ^= 1
    tokens.tofile(f"{prefix}.bin")
    assert sampled(prefix, 3) != before


def test_half_a_copy_shows(tmp_path: Path) -> None:
    """Tools that allocate first leave an interrupted copy at full size, with zeros to the end."""
    prefix = tmp_path / "a"
    write_dataset(prefix, random_documents(0, 2000, 300))
    before, tokens = sampled(prefix, 2), np.fromfile(f"{prefix}.bin", dtype=np.uint16)
    tokens[-100:] = 0
    tokens.tofile(f"{prefix}.bin")
    assert sampled(prefix, 2) != before


@pytest.mark.parametrize("documents", [[[1, 2, 3]], [[]]], ids=["short", "empty"])
def test_files_smaller_than_a_block_are_read_whole(tmp_path: Path, documents: list[list[int]]) -> None:
    assert len(sampled(Path(write_dataset(tmp_path / "a", documents)))) == 64


def test_thousands_of_sources_are_read_no_more_than_a_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Sources(DataConfig(seq_length=8), vocab_size=None, eod_id=None, tokenizer_fingerprint=None)
    one = opened.open(write_dataset(tmp_path / "a", [[1, 2]]))
    blocks: list[int] = []
    monkeypatch.setattr(IndexedDataset, "sampled", lambda self, count: blocks.append(count) or "")
    for count in (1, 64, 100, 5000):
        monkeypatch.setattr(opened, "_opened", {str(number): one for number in range(count)})
        blocks.clear()
        assert len(opened.contents()) == count
        assert sum(blocks) <= max(sources._ALL_BLOCKS, 2 * count) and min(blocks) >= 2
        assert sum(blocks) * SAMPLED_BYTES <= max(4 << 20, 2 * count * SAMPLED_BYTES)
