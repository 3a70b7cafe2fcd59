"""Builds the dataset of one source: its sequences in a split, with a cached index."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.data.cache import CachePlace, IndexCache, remove_leftovers
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.index_builders import Builders, epochs_needed
from megatron.data.indexed.dataset import IndexedDataset
from megatron.data.sft.conversations import Conversations
from megatron.data.sft.dataset import ConversationDataset
from megatron.data.sources import Sources

if TYPE_CHECKING:
    from megatron.config.sections.data import DataConfig

_CACHED_FROM = 1 << 16  # sequences over all epochs; a smaller index is faster to build than to load
_SAID_EVERY = 10.0  # seconds
_FEW = 32  # sources; with thousands, a cache file for each small index costs more than it saves


OwnDataset = GPTDataset | ConversationDataset


@dataclass(frozen=True)
class SourceSlice:
    """Sequences first <= i < last of one source, and its weight in the blend (None: proportional to size)."""

    data: IndexedDataset | Conversations
    fingerprint: str
    first: int
    last: int
    weight: float | None
    tokens: int


class ProgressReporter:
    """Reports the progress of long work, at most once in ten seconds."""

    def __init__(self, say: Callable[[str], None] | None) -> None:
        self._say, self._last = say, time.perf_counter()

    def say(self, text: str) -> None:
        now = time.perf_counter()
        if self._say is not None and now - self._last >= _SAID_EVERY:
            self._last = now
            self._say(f"data: {text} ...")


class SourceDatasets:
    """Builds datasets of single sources; `notes`: lines for the user."""

    def __init__(self, config: "DataConfig", sources: Sources, seed: int, builders: Builders, *, pad_id: int) -> None:
        """Builds nothing yet. `pad_id`: token that pads samples of conversations."""
        self._config, self._sources, self._seed, self._builders = config, sources, seed, builders
        self._pad_id = pad_id
        self._tidied: set[Path] = set()  # cache directories whose leftovers are removed
        self.notes: list[str] = []
        self.progress = ProgressReporter(builders.say)

    def of_slices(self, name: str, parts: Sequence[SourceSlice], samples: Sequence[int | None]) -> list[OwnDataset]:
        built: list[OwnDataset] = []
        for part, wanted in zip(parts, samples):
            self.progress.say(f"{name}: indices of {len(built)} of {len(parts)} sources ready")
            built.append(self.of_slice(name, part, wanted))
        return built

    def of_slice(self, name: str, part: SourceSlice, samples: int | None) -> OwnDataset:
        if isinstance(part.data, Conversations):
            return self._of_conversations(name, part, part.data, samples)
        epochs = 1 if samples is None else epochs_needed(part.tokens, self._config.seq_length, samples)
        small = epochs * (part.last - part.first) < _CACHED_FROM and epochs * part.tokens < _CACHED_FROM * 16
        worth_it = not small or (self._config.data_cache_path is not None and len(self._sources) <= _FEW)
        cache = self.cache(part.data) if worth_it else None
        dataset = GPTDataset(
            part.data,
            first=part.first,
            last=part.last,
            num_samples=samples,
            seq_length=self._config.seq_length,
            seed=self._seed,
            builders=self._builders,
            cache=cache,
            fingerprint=part.fingerprint,
        )
        self.notes += [] if cache is None else cache.notes
        return dataset

    def _of_conversations(
        self, name: str, part: SourceSlice, data: Conversations, samples: int | None
    ) -> ConversationDataset:
        cache = self.cache(data)
        dataset = ConversationDataset(
            data,
            first=part.first,
            last=part.last,
            num_samples=samples,
            seq_length=self._config.seq_length,
            seed=self._seed,
            pad_id=self._pad_id,
            cache=cache,
        )
        self.notes += [*cache.notes, *dataset.notes(name)]
        return dataset

    def cache(self, data: IndexedDataset | Conversations) -> IndexCache:
        files = (data.prefix,) if isinstance(data, Conversations) else None
        place = CachePlace.of(self._config.data_cache_path, data.prefix, files)
        if place.directory not in self._tidied:
            self._tidied.add(place.directory)
            remove_leftovers(place.directory)
        return IndexCache(place, self._builders.say)
