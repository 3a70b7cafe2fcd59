"""Splits long texts at word ends, so that the parts' encodings concatenate to the encoding of the whole."""

import re
from collections.abc import Iterator

# In every known pattern a word ends before a space that follows a visible character.
WORD_END = re.compile(r"(?<=\S) ")
# In GPT-2's pattern a word also ends before a line end that follows a visible character.
WORD_OR_LINE_END = re.compile(r"(?<=\S)[ \n]")


def split_at_words(text: str, size: int, end: re.Pattern[str] = WORD_END) -> Iterator[str]:
    """Splits into parts of about `size` characters."""
    start = 0
    while start < len(text):
        cut = end.search(text, start + size)
        stop = cut.start() if cut else len(text)
        yield text[start:stop]
        start = stop
