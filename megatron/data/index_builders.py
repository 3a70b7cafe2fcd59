"""Builds the index arrays of samples: in C++ if compiled, else in numpy with identical results.

`Builders.resolve()` chooses the implementation and records the reason.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron.commands import build_command
from megatron.data.helpers import INTERFACE, Helpers, helpers
from megatron.errors import ConfigError
from megatron.utils.process import usable_cpus

_INT32_MAX = np.iinfo(np.int32).max
_UINT32_MAX = np.iinfo(np.uint32).max
_BLOCK = 1 << 18  # documents per block in numpy, to keep its temporaries small
_WORTH_A_THREAD = 1 << 18  # entries
_MOST_THREADS = 8  # fewer threads already use the whole memory bandwidth
_WORTH_SAYING = 1 << 25  # entries; building more takes seconds

Implementation = Literal["auto", "c++", "numpy"]


def epochs_needed(tokens_per_epoch: int, seq_length: int, samples: int) -> int:
    """Smallest number of epochs E >= 1 with (E * tokens_per_epoch - 1) // seq_length >= samples."""
    assert tokens_per_epoch > 0
    return max(1, -(-(samples * seq_length + 1) // tokens_per_epoch))


def samples_in(tokens: int, seq_length: int) -> int:
    return max(0, (tokens - 1) // seq_length)


def separate_last_epoch(tokens_per_epoch: int, seq_length: int, epochs: int, samples: int) -> bool:
    """True if the last epoch is shuffled separately, because less than 80 % of it is used."""
    if epochs == 1:
        return False
    from_last = samples - samples_in((epochs - 1) * tokens_per_epoch, seq_length)
    return from_last < int(0.80 * samples_in(tokens_per_epoch, seq_length))


def position_dtype(positions: int) -> np.dtype:
    """Returns the dtype of the sample index. Offsets fit 32 bits; positions in the document index may need 64."""
    return np.dtype(np.int32 if positions <= _INT32_MAX else np.int64)


def shuffle_dtype(samples: int) -> np.dtype:
    return np.dtype(np.int64 if samples >= _UINT32_MAX - 1 else np.uint32)


@dataclass(frozen=True)
class Builders:
    """Index builders in C++ (`helpers`), or in numpy if `helpers` is None."""

    helpers: Helpers | None
    reason: str
    threads: int = 1  # of the C++ loops; the result does not depend on it
    say: Callable[[str], None] | None = None  # called with a line before long work

    @classmethod
    def resolve(
        cls, implementation: Implementation = "auto", *, say: Callable[[str], None] | None = None
    ) -> "Builders":
        if implementation == "numpy":
            return cls(None, "numpy: asked for", say=say)
        try:
            compiled = helpers()
        except (OSError, AttributeError):
            reason = f"not built; run: {build_command()}"
        else:
            if compiled.interface == INTERFACE:
                return cls(compiled, "c++", min(_MOST_THREADS, usable_cpus()), say)
            reason = f"built from other sources; run: {build_command()}"
        if implementation == "c++":
            raise ConfigError(f"data index builders in C++: {reason}")
        return cls(None, f"numpy: C++ {reason}", say=say)

    def _tell(self, entries: int, what: str) -> None:
        if self.say is not None and entries >= _WORTH_SAYING:
            self.say(f"data index: {what.format(f'{entries:,}')} ...")

    def threads_for(self, entries: int) -> int:
        return max(1, min(self.threads, entries // _WORTH_A_THREAD))

    def shuffle(self, values: np.ndarray, rng: np.random.RandomState) -> None:
        """Shuffles in place, bit for bit like rng.shuffle(values)."""
        if self.helpers is None or len(values) > _UINT32_MAX:
            rng.shuffle(values)
            return
        state = rng.get_state(legacy=False)
        assert isinstance(state, dict)
        inner = state["state"]
        inner["pos"] = self.helpers.shuffle(values, inner["key"], int(inner["pos"]))
        rng.set_state(state)

    def document_index(
        self, first: int, count: int, epochs: int, separate: bool, rng: np.random.RandomState
    ) -> np.ndarray:
        """Returns `epochs` copies of the numbers first .. first + count - 1, shuffled together. With `separate`, the
        last copy is shuffled separately."""
        self._tell(epochs * count, "shuffling {} sequences")
        dtype = np.int32 if first + count <= _INT32_MAX else np.int64
        index = np.empty(epochs * count, dtype=dtype)
        for start in range(0, count, _BLOCK):
            stop = min(start + _BLOCK, count)
            index.reshape(epochs, count)[:, start:stop] = np.arange(first + start, first + stop, dtype=dtype)
        cut = (epochs - 1) * count if separate else len(index)
        self.shuffle(index[:cut], rng)
        if separate:
            self.shuffle(index[cut:], rng)
        return index

    def shuffle_index(self, first_part: int, samples: int, rng: np.random.RandomState) -> np.ndarray:
        """Returns 0 .. samples - 1, with the first part and the rest shuffled separately."""
        self._tell(samples, "shuffling {} samples")
        index = np.arange(samples, dtype=shuffle_dtype(samples))
        self.shuffle(index[:first_part], rng)
        if first_part < samples:
            self.shuffle(index[first_part:], rng)
        return index

    def sample_index(self, lengths: np.ndarray, documents: np.ndarray, seq_length: int, samples: int) -> np.ndarray:
        """Returns [samples + 1, 2]: place in `documents` and token offset of each boundary between samples."""
        self._tell(len(documents), "concatenating {} sequences")
        out = np.zeros((samples + 1, 2), dtype=position_dtype(len(documents)))
        if self.helpers is None:
            _sample_index(lengths, documents, seq_length, out)
        else:
            threads = self.threads_for(len(documents))
            self.helpers.sample_index(lengths, documents, seq_length, out, threads=threads)
        return out

    def blend(self, weights: np.ndarray, size: int, limits: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns, per sample, its dataset (int16) and its index there (int64). No dataset exceeds its limit."""
        self._tell(size, "choosing the source of each of {} samples")
        datasets, numbers = np.empty(size, dtype=np.int16), np.empty(size, dtype=np.int64)
        weights = np.ascontiguousarray(weights, dtype=np.float64)
        limits = None if limits is None else np.ascontiguousarray(limits, dtype=np.int64)
        build: Callable[..., None] = _blend if self.helpers is None else self.helpers.blend
        build(weights, limits, datasets, numbers)
        return datasets, numbers


def _sample_index(lengths: np.ndarray, documents: np.ndarray, seq_length: int, out: np.ndarray) -> None:
    """Fills out[k], k > 0, with the place of token k * seq_length of the concatenated documents. Works in blocks to
    save memory."""
    samples, begin, bound = len(out) - 1, 0, 1
    for start in range(0, len(documents), _BLOCK):
        if bound > samples:
            break
        ends = np.cumsum(lengths[documents[start : start + _BLOCK]], dtype=np.int64) + begin
        last = min(samples, (int(ends[-1]) - 1) // seq_length)
        tokens = np.arange(bound, last + 1, dtype=np.int64) * seq_length
        places = np.searchsorted(ends, tokens, side="right")  # skips zero-length documents
        starts = np.where(places > 0, ends[places - 1], begin)
        out[bound : last + 1, 0] = places + start
        out[bound : last + 1, 1] = tokens - starts
        bound, begin = max(bound, last + 1), int(ends[-1])
    if bound <= samples:
        raise IndexError("the documents have fewer tokens than the samples need")


def _blend(weights: np.ndarray, limits: np.ndarray | None, datasets: np.ndarray, numbers: np.ndarray) -> None:
    taken = np.zeros(len(weights))
    errors = np.empty(len(weights))
    for sample in range(len(datasets)):
        np.multiply(weights, float(max(sample, 1)), out=errors)
        np.subtract(errors, taken, out=errors)
        if limits is not None:
            errors[taken >= limits] = -np.inf
        best = int(errors.argmax())  # of equal errors, the first
        if errors[best] == -np.inf:
            raise IndexError("the datasets have fewer samples than the blend needs")
        datasets[sample], numbers[sample] = best, taken[best]
        taken[best] += 1
