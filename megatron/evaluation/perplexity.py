"""Perplexity of texts: per token, per word, and in bits per byte."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.errors import DataError
from megatron.evaluation.scorer import Scores
from megatron.evaluation.sequences import Scored, windows
from megatron.evaluation.texts import Document


@dataclass(frozen=True)
class Perplexity:
    """Rows to score, and the counts that divide their sum."""

    rows: Sequence[Scored]
    documents: int
    skipped: int
    """Documents without a token to predict."""
    words: int | None
    bytes: int | None

    @property
    def counted_tokens(self) -> int:
        return sum(row.count for row in self.rows)

    def result(self, scores: Scores) -> dict[str, Any]:
        loss, tokens = -float(scores.logprobs.sum()), self.counted_tokens
        found: dict[str, Any] = {
            "loss": loss / tokens,
            "perplexity": perplexity_of(loss / tokens),
            "word_perplexity": None,
            "bits_per_byte": None,
            "counted_tokens": tokens,
            "documents": self.documents,
        }
        if self.words:
            found |= {"word_perplexity": perplexity_of(loss / self.words), "words": self.words}
        if self.bytes:
            found |= {"bits_per_byte": loss / math.log(2) / self.bytes, "bytes": self.bytes}
        return found


def plan_windows(
    documents: Sequence[Document], *, window: int, stride: int | None, prefix: int | None, data: str
) -> Perplexity:
    """Cuts every document into windows. `prefix`: id before each document, so that its first token is predicted too.
    Without it the first token is not predicted, and the first word is not counted."""
    rows: list[Scored] = []
    used: list[Document] = []
    for document in documents:
        before = [] if prefix is None else [np.array([prefix], dtype=np.int64)]
        cut = list(windows(np.concatenate([*before, document.tokens]), window, stride or window))
        if cut:
            rows += cut
            used.append(document)
    if not rows:
        why = ", because the first token of each has no context; give longer texts, or --score-first-token"
        raise DataError(f"{data}: no document has a token to predict{'; give it text' if prefix is not None else why}")
    words = [document.words for document in used if document.words is not None]
    size = [document.bytes for document in used if document.bytes is not None]
    less = 1 if prefix is None else 0
    return Perplexity(
        rows,
        len(used),
        len(documents) - len(used),
        sum(max(count - less, 0) for count in words) if words else None,
        sum(size) if size else None,
    )


def notes(task: Perplexity, window: int, data: str) -> list[str]:
    found = []
    if task.skipped:
        found.append(f"{data}: skipped {task.skipped} documents without a token to predict")
    longest = max(row.length for row in task.rows)
    if longest < window:
        found.append(f"{data}: its texts are shorter than the window of {window} tokens: the longest has {longest}")
    return found


def perplexity_of(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        raise DataError(
            f"the loss is {value:.1f} per token or word: its perplexity is too large to compute; check --load and the "
            "data"
        ) from None
