"""Undoes the tokenisation of the WikiText files, so that a model is evaluated on natural text. The rules, their order
and the count of words follow the published perplexities."""

import re
from functools import partial

_PAIRS = (("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'"))
_BEFORE = (
    ("s '", "s'"),
    *((f" @{sign}@ ", sign) for sign in "-,."),
    *((f" {sign} ", f"{sign} ") for sign in ":;.!?,"),
)
_AFTER = (
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)


def detokenize(text: str) -> str:
    for old, new in _BEFORE:
        text = text.replace(old, new)
    for opening, closing in _PAIRS:
        text = re.sub(rf"\{opening}([^\{closing}]*)\{closing}", partial(_closed_up, opening, closing), text)
    for old, new in _AFTER:
        text = text.replace(old, new)
    return text


def _closed_up(opening: str, closing: str, found: re.Match[str]) -> str:
    return f"{opening}{found[1].strip()}{closing}"


def count_words(text: str) -> int:
    """Counts words as the published perplexities do: in the text of the file, where each line end is a word."""
    return len(text.strip().split(" "))
