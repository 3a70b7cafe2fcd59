"""Names the first token to which two tokenizers give different ids, for errors about data of another tokenizer."""

from collections.abc import Iterable
from typing import Protocol

from megatron.errors import MegatronError

Tokens = Iterable[tuple[int, str]]
"""Ids with their texts, as one tokenizer decodes them."""
_HALF = "\ufffd"
"""Replacement character, which stands for a part of a character. A text with it cannot be encoded again."""


class TokenTexts(Protocol):
    """Interface of the tokenizers that are compared."""

    @property
    def vocab_size(self) -> int: ...

    def tokenize(self, text: str) -> list[int]: ...

    def detokenize(self, ids: Iterable[int]) -> str: ...


def tokens_of(tokenizer: TokenTexts) -> Tokens:
    """Yields the whole vocabulary; ids without a text have "" for it."""
    return ((number, _text(tokenizer, number) or "") for number in range(tokenizer.vocab_size))


def token_difference(theirs: Tokens, whose: str, ours: TokenTexts) -> str:
    """Returns "; token 'a' has id 1 in `whose` and id 2 in the run's tokenizer"; "" if there is no difference."""
    for number, text in theirs:
        if not text or _HALF in text or _text(ours, number) == text:
            continue
        here = _ids(ours, text)
        shown = f"id {here[0]}" if len(here) == 1 else f"ids {here[:8]}" if here else "no id"
        if here != [number]:
            return f"; token {text!r} has id {number} in {whose} and {shown} in the run's tokenizer"
    return ""


def _text(tokenizer: TokenTexts, number: int) -> str | None:
    """Text of an id; None if the vocabulary has no such id."""
    try:
        return tokenizer.detokenize([number]) if number < tokenizer.vocab_size else None
    except MegatronError:
        return None


def _ids(tokenizer: TokenTexts, text: str) -> list[int]:
    """Ids of a text; empty if the tokenizer rejects it, as NullTokenizer rejects words."""
    try:
        return tokenizer.tokenize(text)
    except MegatronError:
        return []
