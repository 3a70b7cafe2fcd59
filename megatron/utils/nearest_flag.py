"""Finds the flag that a misspelt one was meant to be, or none: a wrong suggestion costs more than no suggestion."""

import difflib
from collections import Counter
from collections.abc import Sequence

_TOO_COMMON = 8
"""A word in more spellings than this is ignored when flags are compared: "num", "size", "use"."""

_ELSEWHERE = {
    "--tokenizer-model": "tokenizer tokenizer-name tokenizer-path tokenizer-name-or-path",
    "--load": "model model-name model-path model-name-or-path model-id checkpoint pretrained",
    "--input": "train-file data-files files dataset dataset-name",
    "--data": "test-file dataset dataset-name",
    "--json-keys": "text-column text-column-name text-field",
    "--json-key": "text-column text-column-name text-field",
    "--workers": "num-proc num-workers preprocessing-num-workers",
    "--append-eod": "append-eos add-eos-token",
    "--output-prefix": "output-dir output-path",
    "--save": "output-dir output-path",
    "--dtype": "torch-dtype precision",
    "--batch-size": "per-device-eval-batch-size eval-batch-size",
    "--seq-length": "max-length block-size max-seq-length",
    "--max-new-tokens": "max-tokens max-length",
    "--task": "tasks",
}
"""Flags of tools -> names in other programs."""


def named_elsewhere(typed: str, spellings: Sequence[str]) -> str | None:
    """Returns the spelling that has another name in other programs, such as --tokenizer-model for --tokenizer_name."""
    name = typed.lstrip("-").replace("_", "-").lower()
    return next((flag for flag, names in _ELSEWHERE.items() if flag in spellings and name in names.split()), None)


def nearest_flag(typed: str, spellings: Sequence[str]) -> str | None:
    """Returns the closest spelling that shares an uncommon word with `typed`, or differs by at most two letters."""
    word = "--" + typed.lstrip("-").replace("_", "-").lower()
    common = {part for part, count in Counter(p for s in spellings for p in _parts(s)).items() if count > _TOO_COMMON}
    near = [s for s in spellings if _differs_little(word, s)]
    near = near or [s for s in spellings if _mean_the_same(_parts(word) - common, _parts(s) - common)]
    close = difflib.get_close_matches(word, near, n=1, cutoff=0.6)
    return close[0] if close else None


def misspelt(typed: str, spellings: Sequence[str]) -> str | None:
    """Returns the spelling that differs from `typed` by at most two letters."""
    word = "--" + typed.lstrip("-").replace("_", "-").lower()
    return next((spelling for spelling in spellings if _differs_little(word, spelling)), None)


def _parts(spelling: str) -> frozenset[str]:
    return frozenset(spelling.strip("-").replace("_", "-").split("-"))


def _mean_the_same(one: frozenset[str], other: frozenset[str]) -> bool:
    """True if more than half of the words of each are words of both."""
    return 2 * len(one & other) > max(len(one), len(other))


def _differs_little(one: str, other: str) -> bool:
    """True if at most two letters differ. Short names may differ in fewer letters."""
    allowed = min(2, (min(len(one), len(other)) - 2) // 3)
    return abs(len(one) - len(other)) <= allowed and _edits(one, other) <= allowed


def _edits(one: str, other: str) -> int:
    """Number of letters to insert, delete, replace or exchange with their neighbour."""
    before, row = list[int](), list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        last, before, row = before, row, [i]
        for j, there in enumerate(other, 1):
            best = min(row[j - 1] + 1, before[j] + 1, before[j - 1] + (letter != there))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == there:
                best = min(best, last[j - 2] + 1)
            row.append(best)
    return row[-1]
