"""The training, validation and test datasets of a run, and the table that says what is in them.

Every rank builds for itself, from files alone; none waits for another.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatron.data.blended import BlendedDataset, TokenDataset, parse_blend, part_samples, shares_of
from megatron.data.cache import IndexCache, cache_directory
from megatron.data.files import allow_open_files
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.index_builders import Builders
from megatron.data.indexed import IndexedDataset
from megatron.data.mock import MockDataset
from megatron.data.record import check_record, read_record, record_path
from megatron.data.splits import SPLITS, parse_split, split_bounds
from megatron.data.table import Row, render
from megatron.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megatron.config.sections.data import DataConfig


@dataclass(frozen=True)
class Datasets:
    """None where a split is empty or nothing was asked of it. `table` and `notes` are to be printed."""

    train: TokenDataset | None
    valid: TokenDataset | None
    test: TokenDataset | None
    table: str
    notes: tuple[str, ...] = ()
    fingerprint: str = ""  # of the data's content, for the checkpoint


@dataclass(frozen=True)
class Part:
    """The sequences first <= i < last of one source, and its weight in the blend (None: by size)."""

    data: IndexedDataset
    first: int
    last: int
    weight: float | None

    @property
    def tokens(self) -> int:
        return int(self.data.sequence_lengths[self.first : self.last].sum(dtype=np.int64))


def build_train_valid_test(
    config: DataConfig,
    *,
    num_samples: Sequence[int | None],
    seed: int,
    vocab_size: int | None,
    eod_id: int | None,
    tokenizer_fingerprint: str | None = None,
    builders: Builders | None = None,
) -> Datasets:
    """`num_samples` per split, as splits.sample_counts gives them; None asks for one epoch of the split."""
    if config.mock_data:
        return _mock(config, num_samples, seed, vocab_size, eod_id)
    start = time.perf_counter()
    builder = _Builder(config, seed, vocab_size, eod_id, tokenizer_fingerprint, builders or Builders.resolve())
    train, valid, test = (builder.split(split, wanted) for split, wanted in enumerate(num_samples))
    seconds = time.perf_counter() - start
    builder.notes.append(f"indices ready in {seconds:.2f} s (built by {builder.builders.reason})")
    notes = tuple(dict.fromkeys(builder.notes))
    return Datasets(train, valid, test, render(builder.rows), notes, builder.fingerprint())


def _mock(
    config: DataConfig, num_samples: Sequence[int | None], seed: int, vocab_size: int | None, eod_id: int | None
) -> Datasets:
    if config.data_path or config.train_data_path or config.valid_data_path or config.test_data_path:
        raise ConfigError("--mock-data and a data path are both given; choose one")

    def dataset(split: int) -> MockDataset | None:
        wanted = num_samples[split]
        if not wanted:
            return None
        return MockDataset(
            size=wanted, seq_length=config.seq_length, vocab_size=vocab_size, seed=seed, split=split, eod_id=eod_id
        )

    train, valid, test = (dataset(split) for split in range(3))
    rows = [
        Row(name, "mock data", None, 0, 0, len(built), 0.0)
        for name, built in zip(SPLITS, (train, valid, test))
        if built is not None
    ]
    return Datasets(train, valid, test, render(rows), ("mock data: synthetic tokens, no files",), "mock")


class _Builder:
    def __init__(
        self,
        config: DataConfig,
        seed: int,
        vocab_size: int | None,
        eod_id: int | None,
        tokenizer_fingerprint: str | None,
        builders: Builders,
    ) -> None:
        self.config, self.seed, self.builders = config, seed, builders
        self.vocab_size, self.eod_id, self.tokenizer_fingerprint = vocab_size, eod_id, tokenizer_fingerprint
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self._sources: dict[str, tuple[IndexedDataset, str]] = {}  # prefix -> data and its fingerprint
        self.per_split = (config.train_data_path, config.valid_data_path, config.test_data_path)
        if config.data_path and any(self.per_split):
            raise ConfigError(
                "--data-path and --train/valid/test-data-path are both given; use --data-path with --split, "
                "or a path for each split"
            )
        if not config.data_path and not any(self.per_split):
            raise ConfigError("--data-path: not given; give the PREFIX of preprocessed data, or --mock-data")
        parse_split(config.split)  # a typo is refused even where it has no effect

    def fingerprint(self) -> str:
        """Of what the files hold, wherever they lie."""
        digest = hashlib.sha256()
        for data, fingerprint in self._sources.values():
            record = record_path(data.prefix)
            content = record.read_bytes() if record.exists() else b""
            digest.update(f"{fingerprint} {hashlib.sha256(content).hexdigest()}\n".encode())
        return digest.hexdigest()

    def split(self, split: int, wanted: int | None) -> TokenDataset | None:
        """The dataset of one split. An empty one is None, and said; only training cannot do without."""
        name, paths = SPLITS[split], self.config.data_path or self.per_split[split]
        if not paths:
            self.notes.append(f"{name}: no data path, so no {name} data")
            if split == 0 and wanted:
                raise ConfigError("--train-data-path: not given; give it too, or use --data-path with --split")
            return None
        flag = "--data-path" if self.config.data_path else f"--{name}-data-path"
        prefixes, weights = parse_blend(flag, paths)
        allow_open_files(len(self._sources) + len(prefixes))
        parts = [self._part(prefix, split, None if weights is None else w) for prefix, w in _pairs(prefixes, weights)]
        if wanted == 0:
            return None
        used = [part for part in parts if part.tokens]
        if not used:
            self._empty(name, f"{sum(len(part.data) for part in parts)} sequences, of which it gets none", wanted)
            return None
        self.notes += [
            f"{name}: {part.data.prefix} has nothing for it, the other sources share its weight"
            for part in parts
            if not part.tokens
        ]
        direct = len(prefixes) == 1 and (
            weights is None or (self.config.split_rule == "main" and not self.config.data_path)
        )
        if direct:
            return self._single(name, used[0], wanted)
        if weights is None:
            return self._exhaustive(name, flag, used, wanted)
        return self._weighted(name, flag, used, wanted)

    def _empty(self, name: str, why: str, wanted: int | None) -> None:
        if name == "train" and wanted:
            raise DataError(f"the training split is empty ({why}); use more data or another --split")
        self.notes.append(f"{name}: empty ({why})")

    def _part(self, prefix: str, split: int, weight: float | None) -> Part:
        data, _ = self._source(prefix)
        if not self.config.data_path:
            return Part(data, 0, len(data), weight)
        bounds = split_bounds(self.config.split, len(data), self.config.split_rule)
        return Part(data, bounds[split], max(bounds[split], bounds[split + 1]), weight)

    def _source(self, prefix: str) -> tuple[IndexedDataset, str]:
        """Opens and checks a source once."""
        if prefix not in self._sources:
            data = IndexedDataset(prefix, mmap=self.config.mmap_bin_files)
            fingerprint = data.fingerprint
            record = read_record(prefix)
            if record is None:
                self.notes.append(f"{prefix}: no record of its tokenizer; token ids are checked batch by batch")
            else:
                check_record(
                    record,
                    data,
                    data_fingerprint=fingerprint,
                    tokenizer_fingerprint=self.tokenizer_fingerprint,
                    vocab_size=self.vocab_size,
                    eod_id=self.eod_id,
                )
            if len(data) != data.num_documents:
                self.notes.append(
                    f"{prefix}: {data.num_documents} documents of {len(data)} sequences, sampled by sequence"
                )
            self._sources[prefix] = data, fingerprint
        return self._sources[prefix]

    def _dataset(self, part: Part, samples: int | None) -> GPTDataset:
        cache = self._cache(part.data.prefix)
        dataset = GPTDataset(
            part.data,
            first=part.first,
            last=part.last,
            num_samples=samples,
            seq_length=self.config.seq_length,
            seed=self.seed,
            builders=self.builders,
            cache=cache,
            fingerprint=self._sources[part.data.prefix][1],
        )
        self.notes += cache.notes
        return dataset

    def _cache(self, prefix: str) -> IndexCache:
        asked = self.config.data_cache_path
        return IndexCache(cache_directory(asked, prefix), required=asked is not None)

    def _single(self, name: str, part: Part, wanted: int | None) -> TokenDataset | None:
        dataset = self._dataset(part, wanted)
        if not len(dataset):
            self._empty(name, f"{part.tokens} tokens, and one sample takes {self.config.seq_length + 1}", wanted)
            return None
        self._row(name, part, None, len(dataset) if wanted is None else wanted)
        return dataset

    def _weighted(self, name: str, flag: str, parts: list[Part], wanted: int | None) -> TokenDataset:
        if wanted is None:
            raise ConfigError(
                f"{flag}: weights, but the whole {name} split is asked for; give the paths without weights"
            )
        rule = self.config.split_rule
        shares = shares_of([part.weight or 0.0 for part in parts], rule)
        built_for = [part_samples(wanted, share, rule) for share in shares]
        datasets = [self._dataset(part, samples) for part, samples in zip(parts, built_for)]
        size = sum(built_for)
        if rule == "main":
            size = sum(part_samples(wanted, share, rule, surplus=False) for share in shares)
        return self._blend(name, parts, datasets, shares, size, wanted, exhaustive=False)

    def _exhaustive(self, name: str, flag: str, parts: list[Part], wanted: int | None) -> TokenDataset | None:
        """Bare prefixes: every sample of every source at most once, in proportion to their numbers."""
        built = [(part, self._dataset(part, None)) for part in parts]
        kept = [(part, dataset) for part, dataset in built if len(dataset)]
        if not kept:
            self._empty(name, f"no source has the {self.config.seq_length + 1} tokens of one sample", wanted)
            return None
        sizes = [len(dataset) for _, dataset in kept]
        if wanted is not None and wanted > sum(sizes):
            raise DataError(
                f"{flag}: one epoch of its sources is {sum(sizes)} {name} samples, and the run needs {wanted}; "
                f"give weights (weight prefix weight prefix ...) to repeat them, or train shorter"
            )
        size = sum(sizes) if wanted is None else wanted
        parts, datasets = [part for part, _ in kept], [dataset for _, dataset in kept]
        return self._blend(name, parts, datasets, [float(n) for n in sizes], size, size, exhaustive=True)

    def _blend(
        self,
        name: str,
        parts: Sequence[Part],
        datasets: Sequence[GPTDataset],
        weights: Sequence[float],
        size: int,
        needed: int,
        *,
        exhaustive: bool,
    ) -> TokenDataset:
        cache = self._cache(parts[0].data.prefix)
        blend = BlendedDataset(
            datasets, weights, size, needed=needed, exhaustive=exhaustive, builders=self.builders, cache=cache
        )
        self.notes += cache.notes
        counts = np.bincount(blend.indices[:needed], minlength=len(parts)).tolist()
        for part, weight, count in zip(parts, blend.weights.tolist(), counts):
            self._row(name, part, weight, count)
        return blend

    def _row(self, name: str, part: Part, weight: float | None, samples: int) -> None:
        tokens = part.tokens
        epochs = samples * self.config.seq_length / tokens
        self.rows.append(Row(name, part.data.prefix, weight, part.last - part.first, tokens, samples, epochs))


def _pairs(prefixes: list[str], weights: list[float] | None) -> list[tuple[str, float | None]]:
    return list(zip(prefixes, weights)) if weights is not None else [(prefix, None) for prefix in prefixes]
