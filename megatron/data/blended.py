"""Mixes several sources by weight, in the same order as Megatron-LM."""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from megatron.data.cache import Arrays, IndexCache
from megatron.data.index_builders import Builders
from megatron.errors import DataError


class TokenDataset(Protocol):
    """Interface of a dataset for the loader: returns sample i, and locates a token of it in the source files."""

    seq_length: int

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> np.ndarray: ...

    def locate(self, index: int, token: int) -> str: ...


def normalised(weights: Sequence[float] | np.ndarray) -> np.ndarray:
    array = np.array(weights, dtype=np.float64)
    return array / np.sum(array)


def shares_of(weights: Sequence[float], rule: str) -> list[float]:
    """Returns normalised weights with Megatron's rounding. `rule` is the value of --split-rule. The blend
    normalises the weights a second time."""
    if rule == "main":
        return normalised(weights).tolist()
    total = 0.0
    for weight in weights:  # one after another: sum() and numpy.sum round differently
        total += weight
    return [weight / total for weight in weights]


def part_samples(wanted: int, weight: float, rule: str, *, surplus: bool = True) -> int:
    """Number of samples to build for a source. A surplus of 0.5 % ensures that rounding does not exhaust the source."""
    if not surplus:
        return math.ceil(wanted * weight)
    if rule == "main":
        return math.ceil(math.ceil(wanted * weight) * 1.005)
    return math.ceil(wanted * weight * 1.005)


class BlendedDataset:
    """Blend of datasets: sample i comes from the source that is furthest behind its share. Ends where a source is
    exhausted."""

    def __init__(
        self,
        datasets: Sequence[TokenDataset],
        weights: Sequence[float] | np.ndarray,
        size: int,
        *,
        needed: int,
        exhaustive: bool = False,
        builders: Builders | None = None,
        cache: IndexCache | None = None,
    ) -> None:
        """Raises if fewer than `needed` of the `size` samples exist. `exhaustive` limits each source to one epoch."""
        assert len(datasets) == len(weights) > 0
        self.datasets = list(datasets)
        self.seq_length = datasets[0].seq_length
        self.weights = normalised(weights)
        available = np.array([len(dataset) for dataset in datasets], dtype=np.int64)
        builders = builders or Builders.resolve()

        def build() -> Arrays:
            limits = available if exhaustive else None
            indices, numbers = builders.blend(self.weights, size, limits)
            return {"datasets": indices, "numbers": numbers}

        description = {
            "kind": "BlendedDataset",
            "weights": [weight.hex() for weight in self.weights.tolist()],
            "size": size,
            "limits": available.tolist() if exhaustive else None,
        }
        arrays = build() if cache is None else cache.load_or_build(description, build)
        self.indices, self.numbers = arrays["datasets"], arrays["numbers"]
        self._cut_at_first_gap(available, needed)

    def _cut_at_first_gap(self, available: np.ndarray, needed: int) -> None:
        if not len(self.indices):
            return
        if (np.bincount(self.indices, minlength=len(available)) > available).any():
            whole = int(np.argmax(self.numbers >= available[self.indices]))
            if whole < needed:
                raise DataError(
                    f"blend of {len(self.datasets)} sources: source {int(self.indices[whole])} (counted from 0) "
                    f"has no samples left after {whole} of {needed} samples of the blend; lower its weight"
                )
            self.indices, self.numbers = self.indices[:whole], self.numbers[:whole]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.datasets[int(self.indices[index])][int(self.numbers[index])]

    def locate(self, index: int, token: int) -> str:
        return self.datasets[int(self.indices[index])].locate(int(self.numbers[index]), token)
