"""Multiple choice: picks the choice with the highest log-probability, as a sum over its tokens and per character."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.errors import DataError
from megatron.evaluation.scorer import Scores
from megatron.evaluation.sequences import Scored, continuation
from megatron.inference.texts import check_text, read_json_lines, text_under
from megatron.tokenizer import Tokenizer

Fit = Callable[[list[int], list[int], str], tuple[list[int], list[int]]]
"""Function (context, target, place) -> (context, target), cut to the model's window; its errors name the place."""


@dataclass(frozen=True)
class Item:
    rows: tuple[Scored, ...]
    lengths: tuple[int, ...]
    """Characters of each choice."""
    gold: int


@dataclass(frozen=True)
class Choices:
    items: Sequence[Item]
    notes: Sequence[str]

    @property
    def rows(self) -> list[Scored]:
        return [row for item in self.items for row in item.rows]

    def result(self, scores: Scores) -> dict[str, Any]:
        plain, normalised, begin = [], [], 0
        for item in self.items:
            sums = scores.logprobs[begin : begin + len(item.rows)]
            begin += len(item.rows)
            plain.append(int(np.argmax(sums)) == item.gold)
            normalised.append(int(np.argmax(sums / np.array(item.lengths, dtype=np.float64))) == item.gold)
        return {
            "accuracy": float(np.mean(plain)),
            "accuracy_normalised": float(np.mean(normalised)),
            "correct": sum(plain),
            "correct_normalised": sum(normalised),
            "items": len(self.items),
            "choices": len(self.rows),
            "counted_tokens": sum(row.count for row in self.rows),
        }


def plan_choices(data: Path, tokenizer: Tokenizer, fit: Fit) -> Choices:
    """Plans the evaluation of objects with `context`, `choices` and `gold`, the index of the right choice."""
    items, prefixes = [], []
    for place, entry in read_json_lines(data, flag="--data"):
        context = text_under(entry, "context", place, "give a text, which may be empty")
        texts, gold = _choices(entry, place), entry.get("gold")
        if type(gold) is not int or not 0 <= gold < len(texts):
            raise DataError(f"{place}: gold is {gold!r:.40}; give the number of a choice, from 0 to {len(texts) - 1}")
        rows = tuple(_row(context, text, tokenizer, fit, place) for text in texts)
        if _has_prefix(rows):
            prefixes.append(place)
        items.append(Item(rows, tuple(map(len, texts)), gold))
    told = (
        f"{len(prefixes)} items have a choice that is a prefix of another (first: {prefixes[0]}): by the plain sum "
        if prefixes
        else ""
    )
    notes = [f"{told}the shorter one is never less likely; use the normalised accuracy"] if prefixes else []
    return Choices(items, notes)


def _choices(entry: Mapping[str, Any], place: str) -> list[str]:
    texts = entry.get("choices")
    if not isinstance(texts, list) or len(texts) < 2 or not all(isinstance(text, str) for text in texts):
        raise DataError(f"{place}: has no 'choices'; give a list of two or more texts")
    for number, text in enumerate(texts):
        check_text(text, place)
        if not text.strip():
            raise DataError(f"{place}: choice {number} is empty; give it text")
        if text in texts[:number]:
            raise DataError(
                f"{place}: choice {number} is the same as choice {texts.index(text)} ({text[:40]!r}); remove one"
            )
    return texts


def _row(context: str, choice: str, tokenizer: Tokenizer, fit: Fit, place: str) -> Scored:
    between = "" if not context or context[-1].isspace() or choice[0].isspace() else " "
    before, target = encode_pair(tokenizer.tokenize, context, f"{between}{choice}")
    if not before:
        before = [tokenizer.eod]
    if not target:
        raise DataError(f"{place}: the choice {choice[:40]!r} adds no token to its context; give a longer choice")
    return continuation(*fit(before, target, place))


def encode_pair(encode: Callable[[str], list[int]], context: str, target: str) -> tuple[list[int], list[int]]:
    """Returns the tokens of the context and of the target. Spaces at the end of the context move to the target."""
    stripped = context.rstrip()
    target = context[len(stripped) :] + target
    before = encode(stripped) if stripped else []
    return before, encode(stripped + target)[len(before) :]


def _has_prefix(rows: Sequence[Scored]) -> bool:
    targets = [tuple(row.tokens[row.first :].tolist()) for row in rows]
    return any(a is not b and b[: len(a)] == a for a in targets for b in targets)
