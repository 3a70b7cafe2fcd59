from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.data.blended import BlendedDataset, part_samples, shares_of
from megatron.data.cache import CachePlace, IndexCache
from megatron.data.mock import MockDataset
from megatron.errors import DataError
from tests.unit.data import oracle


def source(number: int, size: int) -> MockDataset:
    return MockDataset(size=size, seq_length=4, vocab_size=1000, seed=number, split=0)


def test_sizes_of_parts() -> None:
    assert part_samples(1000, 0.3, "23.06") == 302  # ceil(301.5)
    assert part_samples(7, 0.5, "23.06") == 4 and part_samples(7, 0.5, "main") == 5  # ceil(3.5175), ceil(4 x 1.005)
    assert part_samples(7, 0.5, "main", surplus=False) == 4
    assert shares_of([1, 3], "23.06") == shares_of([1, 3], "main") == [0.25, 0.75]


def test_items_and_places() -> None:
    parts = [source(0, 50), source(1, 50), source(2, 50)]
    blend = BlendedDataset(parts, [2, 5, 3], 60, needed=60)
    datasets, numbers = oracle.blend([2.0, 5.0, 3.0], 60)
    assert len(blend) == 60 and blend.seq_length == 4
    for i, (dataset, number) in enumerate(zip(datasets, numbers)):
        assert np.array_equal(blend[i], parts[dataset][number])
        assert blend.locate(i, 2) == parts[dataset].locate(number, 2)


def test_cut_where_a_source_is_used_up() -> None:
    blend = BlendedDataset([source(0, 5), source(1, 50)], [1, 1], 60, needed=10)
    assert len(blend) == 10
    with pytest.raises(DataError, match=r"source 0 .* has no samples left after 10 of 11 samples"):
        BlendedDataset([source(0, 5), source(1, 50)], [1, 1], 60, needed=11)


def test_exhaustive_takes_each_sample_once() -> None:
    parts = [source(0, 5), source(1, 17), source(2, 1)]
    blend = BlendedDataset(parts, [5, 17, 1], 23, needed=23, exhaustive=True)
    taken = sorted(zip(blend.indices.tolist(), blend.numbers.tolist()))
    assert taken == [(d, n) for d, part in enumerate(parts) for n in range(len(part))]


def test_more_than_255_sources() -> None:
    parts = [source(i, 5) for i in range(400)]
    blend = BlendedDataset(parts, [1.0] * 400, 800, needed=800)
    assert blend.indices.dtype == np.int16 and blend.indices.tolist() == list(range(400)) * 2


def test_cache(tmp_path: Path) -> None:
    def build(weights: list[float]) -> list[int]:
        cache = IndexCache(CachePlace(tmp_path))
        return BlendedDataset([source(0, 50), source(1, 50)], weights, 20, needed=20, cache=cache).indices.tolist()

    assert build([1, 2]) == build([1, 2]) != build([2, 1])
