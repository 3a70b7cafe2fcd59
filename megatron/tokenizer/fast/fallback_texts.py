"""Finds texts that must fall back to the exact encoder, because the encoders' Unicode tables may differ."""

import re
import unicodedata
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

# Characters from here to _PRIVATE are unsafe, except the ideographs of extensions B and C, fixed since Unicode 5.2.
_SCANNED = 0x20000
_OLD_IDEOGRAPHS = ((0x20000, 0x2A6D7), (0x2A700, 0x2B735))
_PRIVATE = 0xE0000
# A small letter in one Unicode table, a letter without case in the other.
_PHARYNGEAL_FRICATIVE = 0x0295
_BLOCK = 1 << 20


class FallbackTexts:
    """Finds texts with unsafe characters. Compared with the fast encoder, the cost is negligible.

    A character is unsafe if Python's Unicode table lacks it. It is then new, so the encoders may disagree whether it
    is a letter. If text is composed (normal form C) before encoding, characters that composition reorders or joins are
    also unsafe. Characters of Unicode 3.2 are exempt, because every table has them.
    """

    def __init__(self, *, composes: bool = False, cased: bool = False, plain_tokens: Sequence[str] = ()) -> None:
        self._table = _table(composes, cased)
        self._tokens = re.compile("|".join(map(re.escape, plain_tokens))) if plain_tokens else None

    def holds_token(self, text: str) -> bool:
        """True if the text contains an added token, so that it must not be cut."""
        return self._tokens is not None and self._tokens.search(text) is not None

    def find(self, texts: Sequence[str], encoded: Sequence[bytes]) -> set[int]:
        """Returns the positions of the texts that need the fallback; `encoded` are the same texts in UTF-8."""
        found = {i for i, text in enumerate(texts) if self.holds_token(text)} if self._tokens else set()
        if self._any(b"".join(encoded)):
            found.update(i for i, data in enumerate(encoded) if self._any(data))
        return found

    def _any(self, data: bytes) -> bool:
        if data.isascii():
            return False
        start = 0
        while start < len(data):
            stop = min(start + _BLOCK, len(data))
            while stop < len(data) and data[stop] & 0xC0 == 0x80:  # inside a character
                stop += 1
            block = np.frombuffer(data, dtype=np.uint8, count=stop - start, offset=start)
            others = block[block >= 0x80].tobytes().decode("utf-8")  # without the ASCII characters
            if self._table[np.frombuffer(others.encode("utf-32-le"), dtype=np.uint32)].any():
                return True
            start = stop
        return False


def _table(composes: bool, cased: bool) -> npt.NDArray[np.bool_]:
    """Marks the unsafe characters."""
    table = np.zeros(0x110000, dtype=np.bool_)
    categories = [*map(unicodedata.category, map(chr, range(_SCANNED)))]
    table[:_SCANNED] = np.array(categories) == "Cn"
    table[_SCANNED:_PRIVATE] = True
    for start, stop in _OLD_IDEOGRAPHS:
        table[start:stop] = False
    table[_PHARYNGEAL_FRICATIVE] = cased
    if composes:
        table[[*_composing()]] = True
    return table


def _composing() -> Iterator[int]:
    """Yields newer characters that normal form C reorders, changes or joins to the preceding one."""
    for code in range(0x300, _SCANNED):
        character = chr(code)
        if unicodedata.ucd_3_2_0.category(character) != "Cn":
            continue
        decomposed = unicodedata.decomposition(character)
        canonical = bool(decomposed) and not decomposed.startswith("<")
        if canonical or unicodedata.combining(character):
            yield code
        if canonical:
            yield from (int(part, 16) for part in decomposed.split()[1:])
