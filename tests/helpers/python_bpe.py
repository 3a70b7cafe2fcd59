"""Byte-level BPE in plain Python, the oracle of GPT-2's tokenizer.

Ids equal those of `tokenizers` for every character in both libraries' Unicode tables. A character that only one table
has (assigned in the last year or two) may be split differently.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import regex

from megatron.tokenizer.bpe_files import BPE
from megatron.tokenizer.byte_alphabet import CHARACTER_OF_BYTE, token_bytes

# Contractions, then words, numbers and other marks, each with at most one leading space, then white space.
# The last white space character before a word belongs to that word.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CACHED_WORDS = 100_000
LONGEST_CACHED_WORD = 256


class PythonBPE:
    def __init__(self, bpe: BPE) -> None:
        self._words = regex.compile(GPT2_PATTERN)
        self._id_of = bpe.vocab
        self._bytes_of = {index: token_bytes(token) for token, index in bpe.vocab.items()}
        self._rank = {merge: rank for rank, merge in enumerate(bpe.merges)}
        self._cache: dict[str, list[int]] = {}

    def tokenize(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in self._words.findall(text):
            ids.extend(self._encode_word(word))
        return ids

    def detokenize(self, ids: Iterable[int]) -> str:
        """Decodes ids. Invalid UTF-8 (a model may stop inside a character) becomes U+FFFD."""
        return b"".join(self._bytes_of.get(index, b"") for index in ids).decode("utf-8", errors="replace")

    def _encode_word(self, word: str) -> list[int]:
        known = self._cache.get(word)
        if known is not None:
            return known
        characters = [CHARACTER_OF_BYTE[byte] for byte in word.encode("utf-8")]
        ids = [self._id_of[symbol] for symbol in merge_all(characters, self._rank)]
        if len(self._cache) < CACHED_WORDS and len(word) <= LONGEST_CACHED_WORD:
            self._cache[word] = ids
        return ids


def merge_all(symbols: list[str], rank: dict[tuple[str, str], int]) -> list[str]:
    """Merges neighbours, always the pair of lowest rank, leftmost first, until no pair is in the table.

    A linked list with a heap of candidate pairs, so that a word of 10 MB takes n log n instead of n squared.
    """
    if len(symbols) < 2:
        return symbols
    symbols = list(symbols)
    end = len(symbols)
    following = list(range(1, end + 1))
    previous = list(range(-1, end - 1))
    candidates: list[tuple[int, int, str, str]] = []

    def offer(left: int, right: int) -> None:
        order = rank.get((symbols[left], symbols[right]))
        if order is not None:
            heapq.heappush(candidates, (order, left, symbols[left], symbols[right]))

    for left in range(end - 1):
        offer(left, left + 1)
    while candidates:
        _, left, left_symbol, right_symbol = heapq.heappop(candidates)
        right = following[left]
        if symbols[left] != left_symbol or right == end or symbols[right] != right_symbol:
            continue  # one of the two has since been merged with its other neighbour
        symbols[left] = left_symbol + right_symbol
        symbols[right] = ""  # so that no candidate matches it again
        following[left] = following[right]
        if following[left] < end:
            previous[following[left]] = left
            offer(left, following[left])
        if previous[left] >= 0:
            offer(previous[left], left)
    return [symbol for symbol in symbols if symbol]
