"""Guards the fast encoder: if its ids differ from the exact ones, the run stops and reports the difference.

1. Only kinds of tokenizer with proven equality use the fast encoder (kinds.py).
2. At the start both encoders encode probe texts with this vocabulary (probe_texts.py).
3. Texts on which the encoders' Unicode tables may differ fall back to the exact encoder (fallback_texts.py).
4. The exact encoder encodes a sample of all text again. A difference raises EncoderDifference.
"""

import logging
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron.errors import ConfigError
from megatron.tokenizer.base import Encoder, EncoderDifference, Ids, refuse_surrogates
from megatron.tokenizer.fast.engine import EnginePanicError, FastEngine
from megatron.tokenizer.fast.fallback_texts import FallbackTexts
from megatron.tokenizer.fast.kinds import NotFastError, fast_kind
from megatron.tokenizer.fast.probe_texts import probe_texts
from megatron.tokenizer.fast.words import WORD_END, split_at_words

ExactEncoder = Callable[[str], Ids]

# One piece of this size is compared per stretch: 0.2 % of the text, which takes a tenth of the fast encoder's time.
PIECE = 2048
STRETCH = 1 << 20
# Every stretch of this many characters has at least one sample, whichever texts the content selects.
LONGEST_UNSAMPLED = 4 * STRETCH
# The first texts are all compared, so that small inputs are covered too.
WARM_UP = 4 * PIECE
EXCERPT = 60
# Longer texts are encoded in parts of this many characters, which bounds the memory besides a text and its ids.
PART = 1 << 20
# Number of ids that are searched at once for those of a piece.
SEARCHED = 1 << 18


def build_guarded(
    name: str,
    description: Callable[[], dict[str, Any]],
    exact: ExactEncoder,
    *,
    encoder: Encoder,
    eod_token: str | None,
    announce: bool = True,
) -> "GuardedEncoder | None":
    """Builds the guarded fast encoder; returns None to use the exact one. `description` returns the tokenizer.json."""
    if encoder == "exact":
        return None
    try:
        return _build(description(), exact, eod_token)
    except NotFastError as reason:
        if encoder == "fast":
            raise ConfigError(f"--encoder fast: {name}: {reason}; give --encoder auto or exact") from None
        if announce:
            logging.getLogger(__name__).warning(
                "%s: the tokenizers package encodes texts, not the fast encoder: %s", name, reason
            )
        return None


def _build(description: dict[str, Any], exact: ExactEncoder, eod_token: str | None) -> "GuardedEncoder":
    kind = fast_kind(description, eod_token)
    engine = FastEngine(kind)
    fallback = FallbackTexts(composes=kind.composes, cased=kind.cased, plain_tokens=kind.plain_tokens)
    for text in probe_texts(kind.description["model"]["vocab"]):
        data = text.encode("utf-8")
        if fallback.find([text], [data]):
            continue
        try:
            differs = not np.array_equal(engine.encode(data), exact(text))
        except EnginePanicError:
            raise NotFastError("gigatoken failed on one of the test texts") from None
        if differs:
            raise NotFastError(f"its ids differ from the exact ones on this vocabulary, as for {text[:60]!r}")
    return GuardedEncoder(engine, exact, fallback)


class GuardedEncoder:
    def __init__(self, engine: FastEngine, exact: ExactEncoder, fallback: FallbackTexts) -> None:
        self._engine, self._exact, self._fallback = engine, exact, fallback
        self._warm_up, self._unsampled = WARM_UP, 0

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        encoded = [_utf8(text, of=text) if len(text) <= PART else b"" for text in texts]
        fallback = self._fallback.find(texts, encoded)
        arrays = []
        for index, (text, data) in enumerate(zip(texts, encoded, strict=True)):
            if index in fallback:
                arrays.append(self._encode_with_fallback(text))
                continue
            try:
                ids = self._engine.encode(data) if len(text) <= PART else self._encode_in_parts(text)
            except EnginePanicError:
                arrays.append(self._exact(text))
                continue
            arrays.append(ids)
            found: int | None = 0
            for start in self._sample(text):
                found = self._compare(index, text, ids, start, found)
        return arrays

    def _encode_in_parts(self, text: str) -> Ids:
        ids = bytearray()  # grows in place; joining arrays would hold the ids twice
        for part in split_at_words(text, PART):
            data = _utf8(part, of=text)
            unsafe = self._fallback.find([part], [data])
            ids += (self._encode_with_fallback(part) if unsafe else self._engine.encode(data)).tobytes()
        return np.frombuffer(ids, dtype=np.int32)

    def _encode_with_fallback(self, text: str) -> Ids:
        """Encodes the unsafe parts of a long text with the exact encoder, the rest with the fast one."""
        if len(text) <= PIECE or self._fallback.holds_token(text):
            return self._exact(text)
        parts = list(split_at_words(text, PIECE))
        encoded = [part.encode("utf-8") for part in parts]
        fallback = self._fallback.find(parts, encoded)
        try:
            return np.concatenate(
                [
                    self._exact(part) if i in fallback else self._engine.encode(encoded[i])
                    for i, part in enumerate(parts)
                ]
            )
        except EnginePanicError:
            return self._exact(text)

    def _sample(self, text: str) -> Sequence[int]:
        """Returns the starts of the pieces to compare. Positions come from the text, so all workers choose the same."""
        size = len(text)
        self._unsampled += size
        chance = zlib.crc32(f"{size}{text[:32]}{text[-32:]}".encode()) / (1 << 32)
        pieces = int(max(size, PIECE) / STRETCH + chance)
        if not pieces:
            if self._warm_up <= 0 and self._unsampled <= LONGEST_UNSAMPLED:
                return ()
            pieces = 1
        self._unsampled = 0
        self._warm_up -= min(size, PIECE)
        return [int((number + chance) / pieces * max(0, size - PIECE)) for number in range(pieces)]

    def _compare(self, index: int, text: str, ids: Ids, start: int, after: int | None) -> int | None:
        """Compares the piece at `start` and returns its position in the ids. The search for the next piece begins
        there, so the ids of a text are searched once. `after`: position of the piece before; None if not found."""
        piece, at_words = _cut(text, start)
        if at_words and after is not None:
            position = find_ids(self._exact(piece), ids, after)
            if position is not None:
                return position
        # A piece cut inside a word may be missing from the ids. Then it, or a short whole text, is encoded again.
        whole = text if at_words and len(text) <= STRETCH else piece
        if whole is not text and self._fallback.find([piece], [piece.encode()]):
            return after  # the exact encoder encoded this piece, so it needs no comparison
        found = ids if whole is text else self._engine.encode(piece.encode())
        if not np.array_equal(self._exact(whole), found):
            raise EncoderDifference(index, self._excerpt(whole))
        return None if at_words else after

    def _excerpt(self, text: str) -> str:
        """Returns a part of the text that still shows the difference, found by halving."""
        while len(text) > EXCERPT:
            middle = len(text) // 2
            halves = [part for part in (text[:middle], text[middle:]) if self._differ(part)]
            if not halves:
                break
            text = halves[0]
        return text if len(text) <= 4 * EXCERPT else text[: 4 * EXCERPT] + "..."

    def _differ(self, text: str) -> bool:
        return not np.array_equal(self._exact(text), self._engine.encode(text.encode()))


def _utf8(part: str, *, of: str) -> bytes:
    try:
        return part.encode("utf-8")
    except UnicodeEncodeError:
        refuse_surrogates(of)
        raise


def _cut(text: str, start: int) -> tuple[str, bool]:
    """Returns about PIECE characters from `start`, and whether both cuts are word ends in every known pattern."""
    if len(text) <= PIECE:
        return text, True
    first = WORD_END.search(text, start, start + PIECE) if start else None
    begin = first.start() if first else start
    last = WORD_END.search(text, begin + PIECE, begin + 2 * PIECE)
    end = last.start() if last else min(begin + PIECE, len(text))
    return text[begin:end], (begin == 0 or first is not None) and (last is not None or end == len(text))


def find_ids(part: Ids, whole: Ids, start: int = 0) -> int | None:
    """Returns the position of `part` in `whole` from `start`, or None. Copies one block at a time."""
    wanted = part.astype(np.int32).tobytes()
    for begin in range(start, len(whole) - len(part) + 1, SEARCHED):
        block = whole[begin : begin + SEARCHED + len(part) - 1].astype(np.int32, copy=False).tobytes()
        position = block.find(wanted)
        while position % 4 and position > 0:
            position = block.find(wanted, position + 1)
        if position >= 0:
            return begin + position // 4
    return None
