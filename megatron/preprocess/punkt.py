"""Splits text into sentences by the rules of Punkt (Kiss and Strunk, 2006), as NLTK 3.10 applies them, in linear time.

NLTK finds or learns the parameters. This splitter cuts the same pieces as NLTK's own, in a quarter of the time. NLTK's
splitter raises TimeoutError when a match takes five seconds of wall clock, as in a text of 3 MB. With
`--keep-newlines`, its time is also quadratic in the length of a word. A candidate is an end mark with the words around
it (its *context*); each candidate is decided independently.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import regex  # `re` and `regex` differ about some letters; NLTK uses `regex`

# The contexts in which a word was seen, as bits: at the beginning of a sentence, inside one, or unknown.
BEGIN_UPPER, INSIDE_UPPER, UNKNOWN_UPPER, BEGIN_LOWER, INSIDE_LOWER, UNKNOWN_LOWER = (1 << bit for bit in range(1, 7))
UPPER = BEGIN_UPPER | INSIDE_UPPER | UNKNOWN_UPPER
LOWER = BEGIN_LOWER | INSIDE_LOWER | UNKNOWN_LOWER

_END_MARKS = ".?!"
_NO_WORD = r"[)\";}\]*:@'({\[\u2018\u2019\u201c\u201d\xab\xbb?!]"  # ends the word before it
_RUN = r"(?:-{2,}|\.{2,}|(?:\.\s){2,}\.)"  # dashes and ellipses are one token
_TOKEN = regex.compile(
    rf"{_RUN}|(?=[^(\"`{{\[:;&#*@)}}\]\-,])\S+?(?=\s|$|{_NO_WORD}|{_RUN}|,(?=$|\s|{_NO_WORD}|{_RUN}))|\S"
)
_CANDIDATE = regex.compile(rf"[.?!](?=({_NO_WORD}|\s+(\S+)))")
_LAST_MARK_OF_A_RUN = regex.compile(r"[.?!](?=[^\s.?!]*(?:\s|\Z))")
_NO_WORD_HERE = regex.compile(_NO_WORD)
_SPACES = regex.compile(r"\s*")
_WORD = regex.compile(r"\S+")
_TO_LAST_NON_SPACE = regex.compile(r"(?s).*\S")
_TO_LAST_SPACE = regex.compile(r"(?s).*\s")
_TO_LAST_ASCII_SPACE = re.compile(r"(?s).*[ \t\n\r\x0b\x0c]")
_CLOSING = regex.compile(r"(?m)[\"')\]}\u2018\u2019\u201c\u201d\xab\xbb]+?(?:\s+|(?=--)|$)")
_NUMBER = regex.compile(r"^-?[\.,]?\d[\d,\.-]*\.?$")
INITIAL = regex.compile(r"[^\W\d]\.$")
ALPHA = regex.compile(r"[^\W\d]+$")
ELLIPSIS = re.compile(r"\.\.+$")

_MOST_REMEMBERED, _LONGEST_REMEMBERED = 1 << 16, 64


@dataclass(frozen=True, slots=True)
class PunktParameters:
    """Learned parameters of a language. Words are in lower case and without their period."""

    abbreviations: frozenset[str]
    collocations: frozenset[tuple[str, str]]
    sentence_starters: frozenset[str]
    contexts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Mark that may end a sentence at `end`; the next sentence would begin at `following`."""

    start: int  # start of the match; with `keep_newlines`, start of the word with the mark
    end: int
    context_end: int
    following: int


class SentenceSplitter:
    """Splits text into sentences, deterministically. Caches decisions in bounded memory.

    Only the white space between two sentences is lost. With `keep_newlines` it stays with the sentence before it, as in
    Megatron-LM, except after a closing quote or bracket and at the end of the text. To bound the time, Megatron-LM cuts
    a text at every millionth character, even within a word. Here time is linear, so no text is cut.
    """

    def __init__(self, parameters: PunktParameters, *, keep_newlines: bool, fingerprint: str = "") -> None:
        self.fingerprint = fingerprint  # equal fingerprints split equally
        self._parameters, self._keep_newlines = parameters, keep_newlines
        self._decided: dict[str, bool] = {}

    def split(self, text: str) -> list[str]:
        pieces = [text[start:stop] for start, stop in _realign(text, self._slices(text))]
        return [piece for piece in pieces if not piece.isspace()]

    def _slices(self, text: str) -> Iterator[tuple[int, int]]:
        begin = 0
        candidates = _candidates_keeping_spaces(text) if self._keep_newlines else _candidates(text)
        for candidate, word_start in _with_their_words(text, candidates):
            if self._is_end(text[word_start : candidate.context_end]):
                yield begin, candidate.end
                begin = candidate.following
        yield begin, len(text.rstrip())

    def _is_end(self, context: str) -> bool:
        if len(context) > _LONGEST_REMEMBERED:
            return self._contains_end(context)
        decision = self._decided.get(context)
        if decision is None:
            if len(self._decided) >= _MOST_REMEMBERED:
                self._decided.clear()
            decision = self._decided[context] = self._contains_end(context)
        return decision

    def _contains_end(self, context: str) -> bool:
        """True if a sentence ends after any word of the context but the last."""
        lines = context.split("\n") if "\n" in context else [context]
        words = [token for line in lines if line.strip() for token in tokens(line)]
        return any(self._ends_sentence(token, after) for token, after in pairwise(words))

    def _ends_sentence(self, token: str, after: str) -> bool:
        if not token.endswith("."):
            return token in ("?", "!")
        abbreviation, ellipsis, ends = self._first_look(token)
        word = _without_period(word_type(token))
        after_type = word_type(after)
        if after.endswith(".") and self._first_look(after)[2]:
            after_type = _without_period(after_type)
        parameters = self._parameters
        if (word, after_type) in parameters.collocations:
            return False
        initial = INITIAL.match(token) is not None
        if (abbreviation or ellipsis) and not initial:
            if self._starts_sentence(after, after_type) is True:
                return True
            if after[0].isupper() and after_type in parameters.sentence_starters:
                return True
        if initial or word == "##number##":
            starts = self._starts_sentence(after, after_type)
            if starts is False:
                return False
            if starts is None and initial and after[0].isupper():
                return ends and bool(parameters.contexts.get(after_type, 0) & LOWER)
        return ends

    def _first_look(self, token: str) -> tuple[bool, bool, bool]:
        """Returns (abbreviation, ellipsis, sentence end) for a token with a final period, without its neighbours."""
        if token == ".":
            return False, False, True
        if ELLIPSIS.match(token):
            return False, True, False
        if token.endswith(".."):
            return False, False, False
        word, known = token[:-1].lower(), self._parameters.abbreviations
        abbreviation = word in known or word.rpartition("-")[2] in known
        return abbreviation, False, not abbreviation

    def _starts_sentence(self, token: str, word: str) -> bool | None:
        """Returns whether a word after a period starts a sentence, judged by its case; None if undecided."""
        if token in (";", ":", ",", ".", "!", "?"):
            return False
        seen = self._parameters.contexts.get(word, 0)
        if token[0].isupper() and seen & LOWER and not seen & INSIDE_UPPER:
            return True
        if token[0].islower() and (seen & UPPER or not seen & BEGIN_LOWER):
            return False
        return None


def tokens(line: str) -> list[str]:
    return _TOKEN.findall(line)


def word_type(token: str) -> str:
    return token.lower() if token.isalpha() else _NUMBER.sub("##number##", token.lower())


def _without_period(word: str) -> str:
    return word[:-1] if len(word) > 1 and word[-1] == "." else word


def _candidates(text: str) -> Iterator[_Candidate]:
    """Yields end marks before white space and a word, or before punctuation. The white space is dropped."""
    for match in _CANDIDATE.finditer(text):
        end = match.end()
        following = match.start(2) if match.start(2) >= 0 else end
        yield _Candidate(match.start(), end, match.end(1), following)


def _candidates_keeping_spaces(text: str) -> Iterator[_Candidate]:
    r"""Yields the matches of Megatron-LM's pattern `\S*[.?!]\s*(?=punctuation|\S+)`: in each run without white space
    the last end mark that has text after it, with the white space after it. A mark at the very end of the text does not
    count, but the run's mark before it does. Searching outwards from the mark takes linear time."""
    found = _TO_LAST_NON_SPACE.match(text)
    last = found.end() if found else 0
    if last and text[last - 1] in _END_MARKS:
        last -= 1
    previous_end = 0
    for match in _LAST_MARK_OF_A_RUN.finditer(text, 0, last):
        mark_end = match.end()
        space = _TO_LAST_SPACE.match(text, previous_end, match.start())
        start = space.end() if space else previous_end
        previous_end = end = _SPACES.match(text, mark_end).end()
        context_end = end + 1 if _NO_WORD_HERE.match(text, end) else _WORD.match(text, end).end()
        yield _Candidate(start, end, context_end, end)


def _with_their_words(text: str, candidates: Iterator[_Candidate]) -> Iterator[tuple[_Candidate, int]]:
    """Yields each candidate with the start of the word before it. Only the last mark within a word counts."""
    previous: _Candidate | None = None
    start, stop = 0, 0
    for candidate in candidates:
        space = _TO_LAST_ASCII_SPACE.match(text, stop, candidate.start)
        # As in NLTK, a space exactly at `stop` does not count; this matters only at the beginning of the text.
        word_start = space.end() if space and space.end() - 1 > stop else start
        if previous is not None and stop <= word_start:
            yield previous, start
        previous, start, stop = candidate, word_start, candidate.start
    if previous is not None:
        yield previous, start


def _realign(text: str, slices: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Moves closing quotes and brackets that begin a slice to the sentence before; drops white space after them."""
    begin, end = next(slices)
    for next_begin, next_end in slices:
        closing = _CLOSING.match(text, next_begin, next_end)
        if closing:
            yield begin, next_begin + len(closing.group().rstrip())
            begin, end = closing.end(), next_end
            continue
        if begin < end:
            yield begin, end
        begin, end = next_begin, next_end
    if begin < end:
        yield begin, end
