"""Texts that the fast encoder is not asked: those where two Unicode tables may differ."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

# Beyond these planes no character that a text would hold is assigned.
_LAST_PLANES = 0x40000
# Small letter by one table, letter without case by another (U+0295, Latin letter pharyngeal voiced fricative).
_RECLASSIFIED = (0x0295,)
_JAMO = (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))
_BLOCK = 1 << 20


class DoubtfulTexts:
    """Finds them at a speed that a fast encoder does not notice.

    A character is doubtful if Python's Unicode table does not know it: it is younger, so one of the two encoders may
    take it for a letter and the other not. Where text is composed (normal form C) before it is encoded, so is
    everything that composing can move or change.
    """

    def __init__(self, *, composes: bool = False, plain_tokens: Sequence[str] = ()) -> None:
        self._composes = composes
        self._tokens = re.compile("|".join(map(re.escape, plain_tokens))) if plain_tokens else None

    def find(self, texts: Sequence[str]) -> set[int]:
        """Their positions."""
        found = {i for i, text in enumerate(texts) if self._tokens.search(text)} if self._tokens else set()
        others = [i for i, text in enumerate(texts) if not text.isascii()]
        if others and self._any("".join([texts[i] for i in others])):
            found.update(i for i in others if self._any(texts[i]))
        return found

    def _any(self, text: str) -> bool:
        for start in range(0, len(text), _BLOCK):
            characters = np.frombuffer(text[start : start + _BLOCK].encode("utf-32-le"), dtype=np.uint32)
            if self._table[characters].any():
                return True
        return False

    @cached_property
    def _table(self) -> npt.NDArray[np.bool_]:
        table = np.zeros(0x110000, dtype=np.bool_)
        category = unicodedata.category
        for code in range(0x80, _LAST_PLANES):
            if category(chr(code)) == "Cn":
                table[code] = True
        table[_LAST_PLANES:0xE0000] = True
        table[[*_RECLASSIFIED]] = True
        if self._composes:
            table[[*_composing()]] = True
        return table


def _composing() -> Iterator[int]:
    """What can change in normal form C, or move, or join what stands before it."""
    yield from _JAMO
    for code in range(0x80, 0x30000):
        character = chr(code)
        if unicodedata.combining(character) or not unicodedata.is_normalized("NFC", character):
            yield code
        decomposed = unicodedata.decomposition(character)
        if decomposed and not decomposed.startswith("<"):
            yield from (int(part, 16) for part in decomposed.split()[1:])
