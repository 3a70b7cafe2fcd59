"""Streams tokens as text: whole characters only, and no text that may turn out to be part of a stop text."""

from collections.abc import Sequence

from megatron.tokenizer import Tokenizer

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 8
"""Number of prompt tokens to decode with the first new ones."""


class TextStream:
    """Text that follows a prompt. It ends before the first of the texts in `stops`."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stops: Sequence[str] = ()) -> None:
        self.tokenizer, self.stops = tokenizer, [stop for stop in stops if stop]
        # Some tokenizers drop a space at the beginning of a text. The last decoded tokens are therefore decoded again
        # together with the next ones; `_decoded` is their number.
        self._context = _end_of(prompt, tokenizer)
        self._tokens, self._decoded = self._context, len(self._context)
        self._all: list[int] = []
        self.text = ""
        self.stopped = self._finished = False
        self._given = 0

    def add(self, token: int) -> bool:
        """Adds a token. Returns True if a stop text is complete, so that the text has ended."""
        self.extend([token])
        self._take_in()
        return self.stopped

    def new_text(self) -> str:
        """Returns the text that has become final since the last call."""
        whole = self.stopped or self._finished
        end = len(self.text) if whole else len(self.text) - self._may_be_a_stop()
        new, self._given = self.text[self._given : end], max(self._given, end)
        return new

    def finish(self) -> None:
        """Ends the stream. Text that was held back is now final, even an incomplete character. All tokens are decoded
        again together, because some tokenizers show none of the characters of consecutive byte tokens if one byte is
        invalid."""
        if not self.stopped:
            before, whole = map(self.tokenizer.detokenize, (self._context, self._context + self._all))
            same = whole.startswith(before)
            self.text = whole[len(before) :] if same else self.tokenizer.detokenize(self._all)
            self._end_at_stop(searched=0)
        self._finished = True

    def extend(self, tokens: Sequence[int]) -> None:
        self._tokens = [*self._tokens, *tokens]
        self._all += tokens

    def _take_in(self) -> None:
        before = self.tokenizer.detokenize(self._tokens[: self._decoded])
        whole = self.tokenizer.detokenize(self._tokens)
        if len(whole) <= len(before) or whole.endswith(_BROKEN):
            return
        searched = max(0, len(self.text) - max(map(len, self.stops), default=0))
        self.text += whole[len(before) :]
        last = self._tokens[self._decoded :]
        if self._decoded and self.tokenizer.detokenize(last).strip():  # after only spaces, more would be dropped
            self._tokens = last
        self._decoded = len(self._tokens)
        self._end_at_stop(searched)

    def _end_at_stop(self, searched: int) -> None:
        places = [place for stop in self.stops if (place := self.text.find(stop, searched)) >= 0]
        if places:
            self.text, self.stopped = self.text[: min(places)], True

    def _may_be_a_stop(self) -> int:
        """Returns the length of the longest suffix of the text that is a prefix of a stop text."""
        return max((_overlap(self.text, stop) for stop in self.stops), default=0)


def _end_of(prompt: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Returns the last tokens of the prompt, from the beginning of a character. With byte tokens, a partial character
    would make the characters after it unreadable."""
    first = max(0, len(prompt) - _CONTEXT)
    while first > 0 and tokenizer.detokenize(prompt[first:]).startswith(_BROKEN):
        first -= 1
    return list(prompt[first:])


def _overlap(text: str, stop: str) -> int:
    return next((size for size in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:size])), 0)
