"""Tokens of every sample, compared with the format notes applied token by token."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.data.cache import CachePlace, IndexCache
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.index_builders import Builders
from megatron.data.indexed.dataset import IndexedDataset
from megatron.errors import ConfigError, DataError
from tests.unit.data.oracle import gpt_samples, random_documents, write_dataset


def tokens_of(dataset: GPTDataset) -> list[list[int]]:
    return [dataset[i].tolist() for i in range(len(dataset))]


def make(prefix: str, **settings_: object) -> GPTDataset:
    data = IndexedDataset(prefix)
    arguments = {"first": 0, "last": len(data), "num_samples": None, "seq_length": 8, "seed": 1234} | settings_
    return GPTDataset(data, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("implementation", ["auto", "numpy"])
@pytest.mark.parametrize(("first", "last"), [(0, 40), (10, 13), (39, 40)])
@pytest.mark.parametrize("wanted", [0, 1, 30, 90, 300])
def test_every_sample(tmp_path: Path, implementation: str, first: int, last: int, wanted: int) -> None:
    texts = random_documents(0, 40, 30)
    texts[39] = [5] * 30
    prefix = write_dataset(tmp_path / "d", texts)
    got = make(
        prefix,
        first=first,
        last=last,
        num_samples=wanted,
        builders=Builders.resolve(implementation),  # type: ignore[arg-type]
    )
    assert tokens_of(got) == gpt_samples(texts, list(range(first, last)), wanted, 8, 1234)
    assert len(got) >= wanted
    assert all(got[i].dtype == np.int64 and got[i].shape == (9,) for i in range(min(3, len(got))))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 25), min_size=1, max_size=12).filter(any),
    wanted=st.integers(0, 60),
    seq=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_lengths(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], wanted: int, seq: int, seed: int
) -> None:
    texts, start = [], 0
    for length in lengths:
        texts.append(list(range(start, start + length)))  # every token tells where it comes from
        start += length
    prefix = write_dataset(tmp_path_factory.mktemp("d") / "d", texts)
    got = make(prefix, num_samples=wanted, seq_length=seq, seed=seed)
    assert tokens_of(got) == gpt_samples(texts, list(range(len(texts))), wanted, seq, seed)
    data = got.data
    for sample in range(min(len(got), 5)):
        for token in range(seq + 1):
            place = got.locate(sample, token).removeprefix(prefix)
            _, offset, sequence = map(int, re.findall(r"\d+", place))
            assert data.get(sequence, offset, 1)[0] == got[sample][token]


def test_seeds_and_lengths_make_other_orders(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(0, 40, 30))
    orders = {
        str(tokens_of(make(prefix, num_samples=50, **changed))) for changed in ({}, {"seed": 1}, {"seq_length": 7})
    }
    assert len(orders) == 3


def test_the_cache_changes_nothing(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(0, 40, 30))
    plain = tokens_of(make(prefix, num_samples=90))
    for _ in range(2):
        assert tokens_of(make(prefix, num_samples=90, cache=IndexCache(CachePlace(tmp_path / "c")))) == plain
    entries = len(list((tmp_path / "c").iterdir()))
    assert entries == 4  # three arrays and their description, once


def test_preprocessing_again_is_never_met_by_an_old_cache(tmp_path: Path) -> None:
    """Different data with the same prefix, document count, size and modification time has another index."""
    for texts in ([[1] * 20, [2] * 10], [[1] * 10, [2] * 20]):
        for path in tmp_path.glob("d.*"):
            path.unlink()
        prefix = write_dataset(tmp_path / "d", texts)
        got = tokens_of(make(prefix, seq_length=4, num_samples=20, cache=IndexCache(CachePlace(tmp_path / "c"))))
        assert got == gpt_samples(texts, [0, 1], 20, 4, 1234)


def test_sequences_without_tokens(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", [[1, 2, 3], [], []])
    with pytest.raises(DataError, match=r"d: sequences 1 to 3 contain no tokens"):
        make(prefix, first=1, last=3)


def test_document_shorter_than_a_sample_is_packed(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", [[1, 2, 3]])
    got = make(prefix, seq_length=8, num_samples=2)
    assert tokens_of(got) == [[1, 2, 3] * 3] * 2 or len(got) >= 2
    assert set(np.concatenate(tokens_of(got)).tolist()) == {1, 2, 3}
    assert len(make(prefix, seq_length=8)) == 0  # one epoch does not fill a sample


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_out_of_range(tmp_path: Path, seed: int) -> None:
    prefix = write_dataset(tmp_path / "d", [[1, 2, 3]])
    with pytest.raises(ConfigError, match=f"--seed {seed}"):
        make(prefix, seed=seed)
