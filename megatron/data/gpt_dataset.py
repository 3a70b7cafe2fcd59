"""Samples of one source, in exactly the same order as Megatron-LM.

1. Repeat the sequences of a split for as many epochs as the samples need; shuffle and concatenate them.
2. Cut the stream every seq_length tokens, with one token of overlap between samples.
3. Shuffle the samples.
"""

import numpy as np

from megatron.data.cache import Arrays, IndexCache
from megatron.data.index_builders import Builders, epochs_needed, samples_in, separate_last_epoch
from megatron.data.indexed.dataset import IndexedDataset
from megatron.errors import ConfigError, DataError


class GPTDataset:
    """`dataset[i]` is int64 [seq_length + 1]: inputs [:-1], labels [1:]."""

    def __init__(
        self,
        data: IndexedDataset,
        *,
        first: int,
        last: int,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        builders: Builders | None = None,
        cache: IndexCache | None = None,
        fingerprint: str | None = None,
    ) -> None:
        """Uses sequences first <= i < last; `num_samples` None means one epoch. `fingerprint` is that of
        `data`, if known already."""
        assert 0 <= first < last <= len(data) and seq_length > 0
        if not 0 <= seed < 2**32:
            raise ConfigError(f"--seed {seed}: the sample order needs a seed from 0 to {2**32 - 1}; choose another")
        self.data, self.seq_length = data, seq_length
        self.first, self.last = first, last
        self.tokens_per_epoch = int(data.sequence_lengths[first:last].sum(dtype=np.int64))
        if self.tokens_per_epoch == 0:
            raise DataError(
                f"{data.prefix}: sequences {first} to {last} contain no tokens; use data that contains text"
            )
        wanted = num_samples or 0
        self.epochs = 1 if num_samples is None else epochs_needed(self.tokens_per_epoch, seq_length, wanted)
        self.separate = separate_last_epoch(self.tokens_per_epoch, seq_length, self.epochs, wanted)
        builders = builders or Builders.resolve()

        def build() -> Arrays:
            return self._build(builders, seed)

        if cache is None:
            arrays = build()
        else:
            arrays = cache.load_or_build(self._description(seed, fingerprint or data.fingerprint), build)
        self.documents: np.ndarray = arrays["documents"]
        self.samples: np.ndarray = arrays["samples"]
        self.order: np.ndarray = arrays["order"]

    def _description(self, seed: int, fingerprint: str) -> dict[str, object]:
        return {
            "kind": "GPTDataset",
            "data": fingerprint,
            "sequences": [self.first, self.last],
            "seq_length": self.seq_length,
            "seed": seed,
            "epochs": self.epochs,
            "separate_last_epoch": self.separate,
        }

    def _build(self, builders: Builders, seed: int) -> Arrays:
        """Shuffles documents, then samples, with one generator. Another order would change the samples of all runs."""
        rng = np.random.RandomState(seed)
        total = samples_in(self.epochs * self.tokens_per_epoch, self.seq_length)
        first_part = total
        if self.separate:
            first_part = samples_in((self.epochs - 1) * self.tokens_per_epoch, self.seq_length)
        documents = builders.document_index(self.first, self.last - self.first, self.epochs, self.separate, rng)
        samples = builders.sample_index(self.data.sequence_lengths, documents, self.seq_length, total)
        return {"documents": documents, "samples": samples, "order": builders.shuffle_index(first_part, total, rng)}

    def epochs_of(self, samples: int) -> float:
        return samples * self.seq_length / self.tokens_per_epoch

    def __len__(self) -> int:
        return len(self.samples) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        sample = int(self.order[index])
        (place, offset), (last_place, last_offset) = self.samples[sample : sample + 2].tolist()
        out = np.empty(self.seq_length + 1, dtype=np.int64)
        filled = 0
        while place < last_place:
            part = self.data.get(int(self.documents[place]), offset)
            out[filled : filled + len(part)] = part
            filled += len(part)
            place, offset = place + 1, 0
        out[filled:] = self.data.get(int(self.documents[place]), offset, last_offset + 1 - offset)
        return out

    def locate(self, index: int, token: int) -> str:
        """Returns the file and document from which token `token` of sample `index` comes."""
        sample = int(self.order[index])
        place, offset = self.samples[sample].tolist()
        while True:
            sequence = int(self.documents[place])
            available = int(self.data.sequence_lengths[sequence]) - offset
            if token < available:
                document = self.data.document_of(sequence)
                return f"{self.data.prefix}, document {document}, token {offset + token} of sequence {sequence}"
            token -= available
            place, offset = place + 1, 0
