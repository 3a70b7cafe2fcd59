"""Synthetic samples for a run without files. They do not depend on the parallel layout."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron.config.blend import SPLITS, data_sources
from megatron.data.datasets import Datasets
from megatron.data.table import MixtureRow, render_mixture
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from megatron.config.sections.data import DataConfig


class MockDataset:
    """Arithmetic sequences with random start and step: learnable, and valid for any vocabulary."""

    def __init__(
        self, *, size: int, seq_length: int, vocab_size: int | None, seed: int, split: int, eod_id: int | None = None
    ) -> None:
        if vocab_size is None or vocab_size < 1:
            raise ConfigError(f"--mock-data: the vocabulary size is {vocab_size}; give --vocab-size or a tokenizer")
        self.size, self.seq_length, self.vocab_size = size, seq_length, vocab_size
        self.seed, self.split, self.eod_id = seed, split, eod_id

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < self.size:
            raise IndexError(f"sample {index} does not exist; the dataset has {self.size}, numbered from 0")
        start, step, end = np.random.SeedSequence([self.seed, self.split, index]).generate_state(3).astype(np.int64)
        tokens = (start + (1 + step % 8) * np.arange(self.seq_length + 1, dtype=np.int64)) % self.vocab_size
        if self.eod_id is not None:
            tokens[end % (self.seq_length + 1)] = self.eod_id
        return tokens

    def locate(self, index: int, token: int) -> str:
        return f"mock data, sample {index}, token {token}"


def mock_datasets(
    config: "DataConfig", num_samples: Sequence[int | None], seed: int, vocab_size: int | None, eod_id: int | None
) -> Datasets:
    """Builds the splits that --mock-data requests."""
    sources = data_sources(config)
    if any(sources.blends):
        raise ConfigError("--mock-data and a data path exclude each other; give one of them")

    def dataset(split: int) -> MockDataset | None:
        wanted = num_samples[split]
        if not wanted or not sources.shares[split]:
            return None
        return MockDataset(
            size=wanted, seq_length=config.seq_length, vocab_size=vocab_size, seed=seed, split=split, eod_id=eod_id
        )

    train, valid, test = (dataset(split) for split in range(3))
    rows = [
        MixtureRow(name, "mock data", None, 0, 0, len(built), 0.0)
        for name, built in zip(SPLITS, (train, valid, test))
        if built is not None
    ]
    table = render_mixture(rows)
    notes = ("mock data: synthetic tokens, no files",)
    return Datasets(train, valid, test, table, notes, "mock", full_table=table)
