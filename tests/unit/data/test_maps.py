"""A bounded number of files is mapped at once, without any other effect."""

from __future__ import annotations

import gc
import os
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from megatron.data import sources
from megatron.data.indexed.dataset import IndexedDataset
from megatron.data.indexed.files import map_tokens
from megatron.data.split_datasets import build_train_valid_test
from megatron.errors import DataError
from tests.unit.data.oracle import random_documents, write_dataset


def descriptors() -> int:
    gc.collect()  # what earlier tests left behind is not counted
    return len(os.listdir("/proc/self/fd"))


def test_a_bounded_number_and_the_same_tokens(tmp_path: Path) -> None:
    prefixes = [write_dataset(tmp_path / f"d{n}", random_documents(n, 20, 30)) for n in range(40)]
    pool, before = lru_cache(5)(map_tokens), descriptors()
    pooled = [IndexedDataset(prefix, pool=pool) for prefix in prefixes]
    plain = [IndexedDataset(prefix) for prefix in prefixes]
    opened = descriptors() - before - len(plain)
    assert opened == 0, "a pooled dataset holds nothing until it is read"
    random = np.random.RandomState(0)
    kept = []
    for _ in range(2000):
        source, sequence = random.randint(40), random.randint(20)
        tokens = pooled[source].get(sequence)
        assert np.array_equal(tokens, plain[source].get(sequence))
        if len(kept) < 200:
            kept.append((tokens, tokens.copy()))
        assert pool.cache_info().currsize <= 5
    assert all(np.array_equal(view, copy) for view, copy in kept), "what was handed out outlives its place in the pool"
    kept.clear()
    del tokens
    assert descriptors() - before - len(plain) <= 5


def test_what_was_read_last_stays(tmp_path: Path) -> None:
    paths = [Path(write_dataset(tmp_path / f"d{n}", [[n] * 4]) + ".bin") for n in range(3)]
    pool, dtype = lru_cache(2)(map_tokens), np.dtype("<u2")
    first = pool(paths[0], dtype, 8)
    pool(paths[1], dtype, 8)
    assert pool(paths[0], dtype, 8) is first
    pool(paths[2], dtype, 8)
    assert pool(paths[0], dtype, 8) is first and pool.cache_info().currsize == 2


def test_a_file_that_changed_meanwhile(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", [[1, 2, 3, 4]])
    data = IndexedDataset(prefix, pool=lru_cache(1)(map_tokens))
    file = Path(f"{prefix}.bin")
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"d\.bin: changed while in use, from 8 to 6 bytes"):
        data.get(0)
    for gone in (lambda: file.write_bytes(b""), file.unlink):
        gone()
        with pytest.raises(DataError, match=r"d\.bin: removed or truncated while in use"):
            data.get(0)


def test_more_sources_than_maps_in_a_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.config import DataConfig

    words = [word for n in range(30) for word in ("1", write_dataset(tmp_path / f"d{n}", [[n + 1] * 9] * 5))]

    def samples() -> list[list[int]]:
        config = DataConfig(seq_length=8, data_path=tuple(words), split="1,0,0")
        built = build_train_valid_test(config, num_samples=(300, 0, 0), seed=1, vocab_size=100, eod_id=0)
        assert built.train is not None
        return [built.train[index].tolist() for index in range(300)]

    whole = samples()
    monkeypatch.setattr(sources, "_MAPPED_AT_ONCE", 3)
    before = descriptors()
    assert samples() == whole
    assert descriptors() <= before + 4
