"""Samples of packed conversations. Every epoch has the same packs in another order."""

import numpy as np

from megatron.data.cache import Arrays, IndexCache
from megatron.data.masks import COUNTED, STARTS
from megatron.data.sft.conversations import Conversations
from megatron.data.sft.packing import Packs, pack
from megatron.errors import ConfigError, DataError

_VERSION = 1  # of the packing rule; a new version makes cached packs invalid
_CACHED_FROM = 1 << 16  # conversations; fewer are packed faster than packs are loaded


class ConversationDataset:
    """`dataset[i]` is int64 [seq_length + 1]: ids, with the marks of `megatron.data.masks` in the bits above them.
    Samples are padded with a token that never counts in the loss."""

    def __init__(
        self,
        data: Conversations,
        *,
        first: int,
        last: int,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        pad_id: int,
        cache: IndexCache | None = None,
    ) -> None:
        """Uses conversations first <= i < last. `num_samples` None means one epoch."""
        if not 0 <= seed < 2**32:
            raise ConfigError(f"--seed {seed}: the sample order needs a seed from 0 to {2**32 - 1}; choose another")
        self.data, self.seq_length, self._pad = data, seq_length, pad_id
        self._cut(first, last)
        packs = self._packs(seed, cache if last - first >= _CACHED_FROM else None)
        self.packs = packs
        rng = np.random.RandomState([seed, 1])
        wanted = len(packs) if num_samples is None else num_samples
        epochs = [rng.permutation(len(packs)) for _ in range(max(1, -(-wanted // len(packs))))]
        self.order = np.concatenate(epochs)[:wanted]

    def _cut(self, first: int, last: int) -> None:
        """Truncates conversations that are longer than a sample. Leaves out those whose kept part has no answer."""
        room = self.seq_length + 1
        lengths = self.data.sequence_lengths[first:last]
        kept = np.minimum(lengths, room)
        used = np.ones(len(kept), dtype=bool)
        for place in np.flatnonzero(lengths > room).tolist():
            start = int(self.data.starts[first + place])
            used[place] = self.data.counted[start : start + room - 1].any()
        self.conversations = first + np.flatnonzero(used)
        self.lengths = kept[used]
        self.dropped, self.cut = int((~used).sum()), int(((lengths > room) & used).sum())
        if not len(self.conversations):
            raise DataError(
                f"--seq-length {self.seq_length}: none of {last - first} conversations of {self.data.prefix} has an "
                "answer within this length; raise --seq-length"
            )

    def _packs(self, seed: int, cache: IndexCache | None) -> Packs:
        def build() -> Arrays:
            packs = pack(self.lengths, self.seq_length + 1, np.random.RandomState(seed))
            return {"members": packs.members, "starts": packs.starts}

        description = {
            "kind": "Packs",
            "version": _VERSION,
            "data": self.data.fingerprint,
            "conversations": [int(self.conversations[0]), int(self.conversations[-1]) + 1],
            "seq_length": self.seq_length,
            "seed": seed,
        }
        arrays = build() if cache is None else cache.load_or_build(description, build)
        return Packs(arrays["members"], arrays["starts"])

    def notes(self, name: str) -> list[str]:
        tokens = int(self.lengths.sum())
        full = tokens / (len(self.packs) * (self.seq_length + 1))
        notes = [
            f"{name}: {self.data.prefix}: {len(self.lengths):,} conversations in {len(self.packs):,} samples, "
            f"{full:.1%} full"
        ]
        if self.cut or self.dropped:
            notes.append(
                f"{name}: {self.data.prefix}: {self.cut + self.dropped:,} conversations are longer than --seq-length "
                f"{self.seq_length}: {self.cut:,} truncated, {self.dropped:,} left out (no answer within that length)"
            )
        return notes

    def epochs_of(self, samples: int) -> float:
        return samples / len(self.packs)

    def __len__(self) -> int:
        return len(self.order)

    def _members(self, index: int) -> np.ndarray:
        number = int(self.order[index])
        return self.packs.members[self.packs.starts[number] : self.packs.starts[number + 1]]

    def __getitem__(self, index: int) -> np.ndarray:
        out = np.full(self.seq_length + 1, self._pad, dtype=np.int64)
        done = 0
        for member in self._members(index).tolist():
            start, length = int(self.data.starts[self.conversations[member]]), int(self.lengths[member])
            part = out[done : done + length]
            part[:] = self.data.tokens[start : start + length]
            part[self.data.counted[start : start + length]] |= COUNTED
            part[0] |= STARTS
            done += length
        if done < len(out):
            out[done] |= STARTS  # the padding cannot attend to a conversation
        return out

    def locate(self, index: int, token: int) -> str:
        """Returns the file and line from which token `token` of sample `index` comes."""
        for member in self._members(index).tolist():
            length = int(self.lengths[member])
            if token < length:
                line = int(self.data.lines[self.conversations[member]])
                return f"{self.data.prefix}, line {line}, token {token} of the conversation"
            token -= length
        return f"{self.data.prefix}, padding of a sample"
