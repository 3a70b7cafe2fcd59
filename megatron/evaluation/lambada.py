"""LAMBADA: is the last word of a passage what the model would say next?"""

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
        """As Megatron-LM counts: right is a passage whose last word is the likeliest, token by token."""
        return {
            "accuracy": float(np.mean(scores.greedy)),
            "correct": int(scores.greedy.sum()),
            "items": len(self.rows),
            "perplexity": perplexity_of(-float(scores.logprobs.mean())),
            "counted_tokens": sum(row.count for row in self.rows),
        }


def plan_passages(data: Path, tokenizer: Tokenizer, fit: Fit, *, strict: bool, json_key: str) -> Lambada:
    """Not strict: the last token of the passage. Strict: all tokens of its last word."""
    rows = []
    for place, entry in read_json_lines(data, flag="--data"):
        text = text_under(entry, json_key, place)
        words = text.split()
        if len(words) < 2:
            raise DataError(f"{place}: {text[:40]!r} has fewer than two words, and the last one needs a context")
        if strict:
            begin = text.rindex(words[-1])
            context, target = tokenizer.tokenize(text[:begin].strip()), tokenizer.tokenize(f" {words[-1]}")
        else:
            tokens = tokenizer.tokenize(text)
            context, target = tokens[:-1], tokens[-1:]
        if not context or not target:
            raise DataError(
                f"{place}: {text[:40]!r} has {len(context) + len(target)} token: no context for the last word"
            )
        rows.append(continuation(*fit(context, target, place)))
    return Lambada(rows)
