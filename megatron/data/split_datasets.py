"""Builds the training, validation and test datasets of a run, and the table that describes them.

Ranks do not communicate: each reads the files. One rank per file system builds an index, and the others map it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from megatron.config.blend import SPLITS, Blend, data_sources
from megatron.config.validation import named_sets
from megatron.data.blended import BlendedDataset, TokenDataset, part_samples, shares_of
from megatron.data.datasets import Datasets
from megatron.data.fim import FillInTheMiddle, FIMDataset, TextTokenizer
from megatron.data.index_builders import Builders
from megatron.data.indexed.record import Fingerprint
from megatron.data.mock import mock_datasets
from megatron.data.sft.conversations import ConversationEncoder
from megatron.data.sft.sources import ConversationSources
from megatron.data.source_datasets import OwnDataset, SourceDatasets, SourceSlice
from megatron.data.sources import Sources, check_border_flag
from megatron.data.splits import split_bounds
from megatron.data.table import MixtureRow, abbreviated, refuse_repeated, render_mixture, warn_repeated
from megatron.data.validation import empty_set
from megatron.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megatron.config.sections.data import DataConfig


def build_train_valid_test(
    config: "DataConfig",
    *,
    num_samples: Sequence[int | None],
    seed: int,
    vocab_size: int | None,
    eod_id: int | None,
    tokenizer_fingerprint: Fingerprint = None,
    tokenizer: TextTokenizer | None = None,
    chat: ConversationEncoder | None = None,
    builders: Builders | None = None,
) -> Datasets:
    """Builds the datasets of the three splits.

    `num_samples` per split comes from splits.sample_counts; None means one epoch. `tokenizer` is for --fim-data and
    for messages, `chat` for --sft.
    """
    builders = builders or Builders.resolve()
    check_border_flag(config, eod_id)
    fim = FillInTheMiddle.of(config, tokenizer) if config.fim_data else None
    if config.mock_data:
        built = mock_datasets(config, num_samples, seed, vocab_size, eod_id)
    else:
        sources = sources_of(
            config,
            vocab_size=vocab_size,
            eod_id=eod_id,
            tokenizer_fingerprint=tokenizer_fingerprint,
            tokenizer=tokenizer,
            chat=chat,
            say=builders.say,
        )
        built = _Builder(config, sources, seed, builders, pad_id=eod_id or 0).build(num_samples)
    if fim is None or tokenizer is None:
        return built
    train, valid, test = (
        None if dataset is None else FIMDataset(dataset, fim, tokenizer, seed=seed, split=split)
        for split, dataset in enumerate((built.train, built.valid, built.test))
    )
    sets = tuple((name, FIMDataset(each, fim, tokenizer, seed=seed, split=1)) for name, each in built.validation_sets)
    return replace(built, train=train, valid=valid, test=test, validation_sets=sets)


def sources_of(
    config: "DataConfig",
    *,
    vocab_size: int | None,
    eod_id: int | None,
    tokenizer_fingerprint: Fingerprint,
    tokenizer: TextTokenizer | None = None,
    chat: ConversationEncoder | None,
    say: Callable[[str], None] | None = None,
) -> Sources:
    """Returns the sources of a run, not opened yet: documents, or conversations under --sft."""
    if not config.sft:
        return Sources(
            config,
            vocab_size=vocab_size,
            eod_id=eod_id,
            tokenizer_fingerprint=tokenizer_fingerprint,
            tokenizer=tokenizer,
        )
    if chat is None:
        raise ConfigError(
            "--sft: datasets_provider passes no chat encoder; pass chat=run.chat to build_train_valid_test"
        )
    return ConversationSources(config, chat, say)


class _Builder:
    """Divides the sources over the splits and blends them."""

    def __init__(self, config: "DataConfig", sources: Sources, seed: int, builders: Builders, *, pad_id: int) -> None:
        self.config, self.sources, self.builders = config, sources, builders
        self.made = SourceDatasets(config, sources, seed, builders, pad_id=pad_id)
        self.notes, self.progress = self.made.notes, self.made.progress
        self.rows: list[MixtureRow] = []
        self.asked = data_sources(config)
        shared = config.data_path or config.data_args_path
        separate = config.train_data_path or config.valid_data_path or config.test_data_path
        if shared and (separate or config.per_split_data_args_path):
            raise ConfigError(
                "--data-path and --train/valid/test-data-path exclude each other; give --data-path with --split, "
                "or a path for each split"
            )
        if not any(self.asked.blends):
            raise ConfigError("--data-path: not given; give the PREFIX of preprocessed data, or --mock-data")

    def build(self, num_samples: Sequence[int | None]) -> Datasets:
        start = time.perf_counter()
        for blend in filter(None, dict.fromkeys(self.asked.blends)):
            self.sources.prepare(blend.prefixes)
            for number, prefix in enumerate(blend.prefixes):
                self.progress.say(f"{number} of {len(blend.prefixes)} sources opened and checked")
                self.sources.open(prefix)
        opened = time.perf_counter()
        apart = self.config.multiple_validation_sets
        train, valid, test = (
            None if apart and split == 1 else self._split(split, wanted) for split, wanted in enumerate(num_samples)
        )
        sets = tuple(self._validation_sets(num_samples[1])) if apart else ()
        ready = time.perf_counter()
        refuse_repeated(self.rows, self.config.max_epochs)
        count = len(self.sources)
        seconds = (
            f"{count} {'source' if count == 1 else 'sources'} opened and checked in {opened - start:.2f} s, "
            f"indices ready in {ready - opened:.2f} s (built by {self.builders.reason})"
        )
        notes = tuple(dict.fromkeys([*self.sources.notes(), *self.notes, seconds]))
        return Datasets(
            train,
            valid,
            test,
            render_mixture(abbreviated(self.rows)),
            notes,
            self.sources.fingerprint(self._mixture()),
            self.sources.contents(),
            tuple(warn_repeated(self.rows)),
            render_mixture(self.rows),
            sets,
        )

    def _mixture(self) -> str:
        """Describes split and weight of each source. Together with the content, they determine the sample order."""
        lines = []
        for name, blend in zip(SPLITS, self.asked.blends):
            if blend is None or self._direct(blend) or (blend.weights is None and self.asked.cut):
                continue  # the order of the sources already determines this split
            weights = " ".join(weight.hex() for weight in blend.weights or ())
            lines.append(f"{name} {' '.join(self.sources.open(p).index_fingerprint for p in blend.prefixes)} {weights}")
        return "\n".join(lines)

    def _split(self, split: int, wanted: int | None) -> TokenDataset | None:
        """Builds the dataset of one split. Returns None with a note if it is empty. Raises instead for an empty
        training split, and for a validation set with its own files."""
        name, blend = SPLITS[split], self.asked.blends[split]
        if blend is None:
            self.notes.append(f"{name}: no data path, so no {name} data")
            if split == 0 and wanted:
                raise ConfigError("--train-data-path: not given; add it, or use --data-path with --split")
            return None
        if wanted == 0:
            return None
        weights: Sequence[float | None] = blend.weights or [None] * len(blend.prefixes)
        parts = [self._part(prefix, split, weight) for prefix, weight in zip(blend.prefixes, weights)]
        used = [part for part in parts if part.tokens]
        if not used and name == "valid" and not self.asked.cut:
            raise empty_set(blend.flag, blend.prefixes[0], "validation set", 0, self.config.seq_length)
        if not used:
            self._empty(name, f"it gets none of the {sum(len(part.data) for part in parts)} sequences", wanted)
            return None
        self._say_unused(name, [part.data.prefix for part in parts if not part.tokens])
        if self._direct(blend):
            return self._single(name, used[0], wanted)
        if blend.weights is None:
            return self._exhaustive(name, blend.flag, used, wanted)
        return self._weighted(name, blend.flag, used, wanted)

    def _validation_sets(self, wanted: int | None) -> Iterator[tuple[str, TokenDataset]]:
        """Yields each source of the validation split as a separate set."""
        blend = self.asked.blends[1]
        if blend is None or wanted == 0:
            return
        for name, prefix in named_sets(self.config, blend):
            part = self._part(prefix, 1, None)
            dataset = self._single(f"valid {name}", part, wanted) if part.tokens else None
            if dataset is None:
                length = self.config.seq_length
                raise empty_set(blend.flag, prefix, f"validation set {name}", part.tokens, length)
            yield name, dataset

    def _direct(self, blend: Blend) -> bool:
        """True if the split reads one source directly. A weighted source needs a blend for Megatron's surplus."""
        weighted = blend.weights is not None and (self.config.split_rule != "main" or self.asked.cut)
        return len(blend.prefixes) == 1 and not weighted

    def _say_unused(self, name: str, prefixes: Sequence[str]) -> None:
        if prefixes:
            more = f" and {len(prefixes) - 1} others" if len(prefixes) > 1 else ""
            verb = "have" if more else "has"
            self.notes.append(
                f"{name}: {prefixes[0]}{more} {verb} no {name} data; the weight is divided among the other sources"
            )

    def _empty(self, name: str, why: str, wanted: int | None) -> None:
        if name == "train" and wanted:
            raise DataError(f"the training split is empty ({why}); use more data or another --split")
        self.notes.append(f"{name}: empty ({why})")

    def _part(self, prefix: str, split: int, weight: float | None) -> SourceSlice:
        source = self.sources.open(prefix)
        data = source.data
        bounds = (0, len(data))
        if self.asked.cut:
            cuts = split_bounds(self.asked.shares, len(data), self.config.split_rule)
            bounds = (cuts[split], max(cuts[split], cuts[split + 1]))
        tokens = int(data.sequence_lengths[bounds[0] : bounds[1]].sum(dtype=np.int64))
        return SourceSlice(data, source.index_fingerprint, *bounds, weight, tokens)

    def _single(self, name: str, part: SourceSlice, wanted: int | None) -> TokenDataset | None:
        dataset = self.made.of_slice(name, part, wanted)
        if not len(dataset):
            self._empty(name, f"{part.tokens} tokens, and one sample takes {self.config.seq_length + 1}", wanted)
            return None
        self._row(name, part, dataset, None, len(dataset) if wanted is None else wanted)
        return dataset

    def _weighted(self, name: str, flag: str, parts: list[SourceSlice], wanted: int | None) -> TokenDataset:
        if wanted is None:
            raise ConfigError(
                f"{flag}: has weights, but the run uses the whole {name} split; give the paths without weights"
            )
        rule = self.config.split_rule
        shares = shares_of([part.weight or 0.0 for part in parts], rule)
        built_for = [part_samples(wanted, share, rule) for share in shares]
        datasets = self.made.of_slices(name, parts, built_for)
        size = sum(built_for)
        if rule == "main":
            size = sum(part_samples(wanted, share, rule, surplus=False) for share in shares)
        return self._blend(name, parts, datasets, shares, size, wanted, exhaustive=False)

    def _exhaustive(self, name: str, flag: str, parts: list[SourceSlice], wanted: int | None) -> TokenDataset | None:
        """Blends prefixes without weights: sources in proportion to their size, each sample at most once."""
        datasets = self.made.of_slices(name, parts, [None] * len(parts))
        kept = [(part, dataset) for part, dataset in zip(parts, datasets) if len(dataset)]
        if not kept:
            self._empty(name, f"no source has the {self.config.seq_length + 1} tokens of one sample", wanted)
            return None
        sizes = [len(dataset) for _, dataset in kept]
        if wanted is not None and wanted > sum(sizes) and name != "train":
            self.notes.append(f"{name}: its sources have {sum(sizes)} samples; an evaluation then reads them again")
            wanted = sum(sizes)
        if wanted is not None and wanted > sum(sizes):
            raise DataError(
                f"{flag}: its sources have {sum(sizes)} {name} samples in one epoch, but the run needs {wanted}; give "
                f"weights (WEIGHT PREFIX WEIGHT PREFIX ...) to repeat the sources, or train for fewer steps"
            )
        size = sum(sizes) if wanted is None else wanted
        parts, datasets = [part for part, _ in kept], [dataset for _, dataset in kept]
        return self._blend(name, parts, datasets, [float(n) for n in sizes], size, size, exhaustive=True)

    def _blend(
        self,
        name: str,
        parts: Sequence[SourceSlice],
        datasets: Sequence[OwnDataset],
        weights: Sequence[float],
        size: int,
        needed: int,
        *,
        exhaustive: bool,
    ) -> TokenDataset:
        cache = self.made.cache(parts[0].data)
        blend = BlendedDataset(
            datasets, weights, size, needed=needed, exhaustive=exhaustive, builders=self.builders, cache=cache
        )
        self.notes += cache.notes
        counts = np.bincount(blend.indices[:needed], minlength=len(parts)).tolist()
        for part, dataset, weight, count in zip(parts, datasets, blend.weights.tolist(), counts):
            self._row(name, part, dataset, weight, count)
        return blend

    def _row(self, name: str, part: SourceSlice, dataset: OwnDataset, weight: float | None, samples: int) -> None:
        epochs = dataset.epochs_of(samples)
        sequences = part.last - part.first
        self.rows.append(MixtureRow(name, part.data.prefix, weight, sequences, part.tokens, samples, epochs))
