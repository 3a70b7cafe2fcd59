"""Names the first token to which two tokenizers give different ids, for errors about data of another tokenizer."""

from collections.abc import Iterable
from typing import Protocol

Tokens = Iterable[tuple[int, str]]
"""Ids with their texts, as one tokenizer decodes them."""
_HALF = "\ufffd"
"""Part of a character: it cannot be encoded again."""


class TokenTexts(Protocol):
    """The part of a tokenizer that is compared."""

    @property
    def vocab_size(self) -> int: ...

    def tokenize(self, text: str) -> list[int]: ...

    def detokenize(self, ids: Iterable[int]) -> str: ...


def tokens_of(tokenizer: TokenTexts) -> Tokens:
    return ((number, tokenizer.detokenize([number])) for number in range(tokenizer.vocab_size))


def token_difference(theirs: Tokens, whose: str, ours: TokenTexts) -> str:
    """Returns "; token 'a' has id 1 in the data and id 2 in the run's tokenizer"; "" if all of `theirs` agree."""
    for number, text in theirs:
        if _HALF in text or (number < ours.vocab_size and ours.detokenize([number]) == text):
            continue
        here = ours.tokenize(text)
        shown = f"id {here[0]}" if len(here) == 1 else f"ids {here[:8]}" if here else "no id"
        if here != [number]:
            return f"; token {text!r} has id {number} in {whose} and {shown} in the run's tokenizer"
    return ""
