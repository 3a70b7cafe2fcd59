"""Fill in the middle: cuts documents in three and moves the middle to the end, so that a model learns to insert.

- PSM: `<prefix> prefix <suffix> suffix <middle> middle`
- SPM, with the suffix first: `<prefix> <suffix> suffix <middle> prefix middle`

A cut may fall between any two characters. Only a token that is cut is re-encoded, so the parts in their original order
give the original text. The result depends only on the seed and the sample's index. Rearranging adds tokens; the sample
is truncated to its length.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np

from megatron.data.blended import TokenDataset
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from megatron.config.sections.data import DataConfig

_STREAM = 0xF13  # separates these draws from others with the same seed


class TextTokenizer(Protocol):
    """Interface of the tokenizer that this module needs. No text may encode to a special token."""

    @property
    def vocab_size(self) -> int: ...

    def token_id(self, token: str) -> int | None: ...

    def tokenize(self, text: str) -> list[int]: ...

    def detokenize(self, ids: Iterable[int]) -> str: ...


@dataclass(frozen=True, kw_only=True)
class FillInTheMiddle:
    """Settings of fill in the middle: rates, special tokens, and the beginning of texts that are left unchanged."""

    rate: float
    spm_rate: float
    prefix: int
    middle: int
    suffix: int
    eod: int
    fragment: int | None = None  # splits a document into fragments that are rearranged separately
    fragment_rate: float = 0.0
    no_prefix: str | None = None

    @classmethod
    def of(cls, config: "DataConfig", tokenizer: TextTokenizer | None) -> "FillInTheMiddle":
        if tokenizer is None:
            raise ConfigError(
                "--fim-data: needs a text tokenizer, but this run has none; give a tokenizer, or remove --fim-data"
            )

        def token(flag: str, name: str) -> int:
            number = tokenizer.token_id(name)
            if number is None:
                raise ConfigError(
                    f"{flag} {name}: the tokenizer's vocabulary of {tokenizer.vocab_size} tokens does not contain it; "
                    f"give a token of the vocabulary, or use another tokenizer"
                )
            return number

        split = config.fim_split_sample
        fim = cls(
            rate=config.fim_rate,
            spm_rate=config.fim_spm_rate,
            prefix=token("--fim-prefix-token", config.fim_prefix_token),
            middle=token("--fim-middle-token", config.fim_middle_token),
            suffix=token("--fim-suffix-token", config.fim_suffix_token),
            eod=token("--fim-eod-token", config.fim_eod_token),
            fragment=None if split is None else token("--fim-split-sample", split),
            fragment_rate=config.fim_fragment_rate or 0.0,
            no_prefix=config.fim_no_prefix,
        )
        marks = (fim.prefix, fim.middle, fim.suffix, fim.eod, *([] if fim.fragment is None else [fim.fragment]))
        if len(set(marks)) < len(marks):
            raise ConfigError(
                "--fim-prefix-token, another --fim-...-token flag or --fim-split-sample: two of them name the same "
                "token; give each flag a different token"
            )
        return fim


class FIMDataset:
    """The samples of another dataset, rearranged."""

    def __init__(
        self, dataset: TokenDataset, fim: FillInTheMiddle, tokenizer: TextTokenizer, *, seed: int, split: int
    ) -> None:
        self.dataset, self.fim, self.tokenizer = dataset, fim, tokenizer
        self.seed, self.split = seed, split
        self.seq_length = dataset.seq_length
        self._vocab_size = tokenizer.vocab_size
        self._lengths = np.full(self._vocab_size, -1, dtype=np.int32)  # characters of each token; -1: unknown

    def __len__(self) -> int:
        return len(self.dataset)

    def locate(self, index: int, token: int) -> str:
        return self.dataset.locate(index, token)

    def __getitem__(self, index: int) -> np.ndarray:
        tokens = self.dataset[index]
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            return tokens  # unchanged, so that the loader reports the token with its place
        # The legacy generator: numpy guarantees its stream in every version.
        rng = np.random.RandomState([_STREAM, self.seed, self.split, index & 0xFFFFFFFF, index >> 32])
        parts = []
        for document, end in cut_at(tokens, self.fim.eod):
            parts += [self._document(document, rng), end]
        return np.concatenate(parts)[: len(tokens)]

    def _document(self, tokens: np.ndarray, rng: np.random.RandomState) -> np.ndarray:
        fim = self.fim
        if fim.fragment is None or not (tokens == fim.fragment).any():
            return self._rearranged(tokens, fim.rate, rng)
        if rng.random_sample() >= fim.rate:
            return tokens
        parts = []
        for fragment, end in cut_at(tokens, fim.fragment):
            parts += [self._rearranged(fragment, fim.fragment_rate, rng), end]
        return np.concatenate(parts)

    def _rearranged(self, tokens: np.ndarray, rate: float, rng: np.random.RandomState) -> np.ndarray:
        fim = self.fim
        if not len(tokens) or rng.random_sample() >= rate or self._excepted(tokens):
            return tokens
        ends = np.cumsum(self._characters(tokens), dtype=np.int64)
        cuts = np.sort(rng.randint(0, int(ends[-1]) + 1, size=2)).tolist()
        prefix, middle, suffix = self._pieces(tokens, ends, cuts)
        if rng.random_sample() < fim.spm_rate:
            order = [[fim.prefix, fim.suffix], suffix, [fim.middle], prefix, middle]
        else:
            order = [[fim.prefix], prefix, [fim.suffix], suffix, [fim.middle], middle]
        return np.concatenate([np.asarray(part, dtype=np.int64) for part in order])

    def _excepted(self, tokens: np.ndarray) -> bool:
        text = self.fim.no_prefix
        return text is not None and self.tokenizer.detokenize(tokens[: 4 * len(text)].tolist()).startswith(text)

    def _characters(self, tokens: np.ndarray) -> np.ndarray:
        """Number of characters of each token: [n] -> [n]. A token with an incomplete character counts 0, so no cut
        splits it."""
        lengths = self._lengths[tokens]
        if (lengths < 0).any():
            for token in np.unique(tokens[lengths < 0]).tolist():
                text = self.tokenizer.detokenize([token])
                self._lengths[token] = 0 if "\ufffd" in text else len(text)
            lengths = self._lengths[tokens]
        return lengths

    def _pieces(self, tokens: np.ndarray, ends: np.ndarray, cuts: Sequence[int]) -> list[np.ndarray]:
        """Returns the tokens between the cuts, len(cuts) + 1 pieces. `ends`: character offset of each token's end."""
        places = np.searchsorted(ends, cuts, side="right").tolist()  # the token with the character after the cut
        pieces: list[list[np.ndarray | list[int]]] = [[]]
        done = 0
        for place in sorted(set(places)):
            start = int(ends[place - 1]) if place else 0
            inside = [cut - start for cut, at in zip(cuts, places) if at == place]
            first, *others = (
                self._cut_token(int(tokens[place]), inside) if place < len(tokens) else [[]] * (len(inside) + 1)
            )
            pieces[-1] += [tokens[done:place], first]
            pieces += [[ids] for ids in others]
            done = place + 1
        pieces[-1].append(tokens[done:])
        return [np.concatenate([np.asarray(part, dtype=np.int64) for part in piece]) for piece in pieces]

    def _cut_token(self, token: int, cuts: Sequence[int]) -> list[list[int]]:
        """Splits a token's text at the character offsets `cuts` and encodes the parts. Returns len(cuts) + 1 lists of
        ids. If the token or the parts would not decode to the same text, all lists are empty except the last, which has
        the token."""
        before: list[list[int]] = [*([] for _ in cuts), [token]]
        if not any(cuts):
            return before
        text, encode = self.tokenizer.detokenize([token]), self.tokenizer.tokenize
        if encode(text) != [token]:  # a special token, or one that no text encodes to
            return before
        bounds = [0, *cuts, len(text)]
        parts = [encode(text[start:stop]) if start < stop else [] for start, stop in pairwise(bounds)]
        return parts if self.tokenizer.detokenize([i for part in parts for i in part]) == text else before


def cut_at(tokens: np.ndarray, mark: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (tokens before a mark, the mark) in order, then (tokens after the last mark, nothing)."""
    start = 0
    for place in np.flatnonzero(tokens == mark).tolist():
        yield tokens[start:place], tokens[place : place + 1]
        start = place + 1
    yield tokens[start:], tokens[:0]
