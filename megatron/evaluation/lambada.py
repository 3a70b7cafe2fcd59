"""LAMBADA: tests whether the model predicts the last word of a passage."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.errors import DataError
from megatron.evaluation.choices import Fit
from megatron.evaluation.perplexity import perplexity_of
from megatron.evaluation.scorer import Scores
from megatron.evaluation.sequences import Scored, continuation
from megatron.inference.texts import read_json_lines, text_under
from megatron.tokenizer import Tokenizer


@dataclass(frozen=True)
class Lambada:
    rows: Sequence[Scored]

    def result(self, scores: Scores) -> dict[str, Any]:
        """Counts as in Megatron-LM: a passage is correct if each target token is the model's top prediction."""
        return {
            "accuracy": float(np.mean(scores.greedy)),
            "correct": int(scores.greedy.sum()),
            "items": len(self.rows),
            "perplexity": perplexity_of(-float(scores.logprobs.mean())),
            "counted_tokens": sum(row.count for row in self.rows),
        }


def plan_passages(data: Path, tokenizer: Tokenizer, fit: Fit, *, strict: bool, json_key: str) -> Lambada:
    """Plans the passages. The target is the last token of a passage; if `strict`, all tokens of its last word."""
    rows = []
    for place, entry in read_json_lines(data, flag="--data"):
        text = text_under(entry, json_key, place)
        words = text.split()
        if len(words) < 2:
            raise DataError(
                f"{place}: {text[:40]!r} has fewer than two words, but the last one needs a context; give a longer text"
            )
        if strict:
            begin = text.rindex(words[-1])
            context, target = tokenizer.tokenize(text[:begin].strip()), tokenizer.tokenize(f" {words[-1]}")
        else:
            tokens = tokenizer.tokenize(text)
            context, target = tokens[:-1], tokens[-1:]
        if not context or not target:
            raise DataError(
                f"{place}: {text[:40]!r} has {len(context) + len(target)} token, so the last word has no context; "
                "give a longer text"
            )
        rows.append(continuation(*fit(context, target, place)))
    return Lambada(rows)
