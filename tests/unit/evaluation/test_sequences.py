"""Windows: every token but the first is predicted once, with as much context as the stride leaves."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest

from megatron.errors import ConfigError
from megatron.evaluation.choices import encode_pair
from megatron.evaluation.sequences import windows
from megatron.evaluation.wikitext import count_words, detokenize


@pytest.mark.parametrize("length", [0, 1, 2, 3, 8, 9, 10, 17, 40])
@pytest.mark.parametrize(("window", "stride"), [(8, 8), (8, 3), (8, 1), (1, 1), (50, 50)])
def test_every_token_is_predicted_once(length: int, window: int, stride: int) -> None:
    predicted = []
    for number, row in enumerate(windows(np.arange(length), window, stride)):
        assert row.length <= window and row.tokens[0] == number * stride
        assert number == 0 or row.first > window - stride, "context"
        predicted += row.tokens[row.first :].tolist()
    assert predicted == list(range(1, length))


def test_the_windows_of_megatron_lm() -> None:
    """1 + targets tokens give ceil((targets - window) / stride) + 1 windows; the first scores a full window."""
    counts = [row.count for row in windows(np.arange(21), 8, 3)]
    assert counts == [8, 3, 3, 3, 3] and len(counts) == -(-(20 - 8) // 3) + 1


def test_a_stride_that_skips_tokens_is_refused() -> None:
    for stride in (0, 9):
        with pytest.raises(ConfigError, match=f"--overlapping-eval {stride}"):
            list(windows(np.arange(20), 8, stride))


def test_text_as_people_write_it() -> None:
    tokens = ' \n = Robert <unk> = \n \n In 2 @,@ 000 he \'s ( or was ) " well @-@ known " ; it is 3 @.@ 5 . The end \n'
    text = '\n= Robert <unk> =\n\nIn 2,000 he\'s (or was) "well-known"; it is 3.5. The end\n'
    assert detokenize(tokens) == text
    assert count_words(tokens) == len(tokens.strip().split(" "))


def pieces_of_wikitext() -> list[str]:
    """Texts that exercise the rules, in any order."""
    marks = (
        " @-@ ",
        " @,@ ",
        " ; ",
        " . ",
        "( a ) ",
        ' " b " ',
        " 's ",
        " ' c ' ",
        " = = ",
        " \n ",
        " N ",
        " ° ",
        "s '",
    )
    draw = random.Random(1)
    return [
        "".join(draw.choice((*marks, "[ d", "{ }")) + draw.choice(("", "word")) for _ in range(8)) for _ in range(200)
    ]


OF_THE_HARNESS = "ac96d93c94cc73c5e0fd6e17dd162f029c058301b91f5c01b7ee178337fcd3ff"
"""sha256 of lm_eval 0.4.13's output for these texts."""


def test_the_rules_are_those_of_the_harness() -> None:
    ours = "\0".join(map(detokenize, pieces_of_wikitext()))
    assert hashlib.sha256(ours.encode()).hexdigest() == OF_THE_HARNESS


def test_the_recorded_rules_are_those_of_the_harness_installed() -> None:
    theirs = pytest.importorskip("lm_eval.tasks.wikitext.preprocess_wikitext")
    for text in pieces_of_wikitext():
        assert detokenize(text) == theirs.wikitext_detokenizer({"page": text}), repr(text)


def test_spaces_between_belong_to_the_target() -> None:
    def words(text: str) -> list[int]:  # a token per word, with the space before it
        return [hash(word) for word in text.replace(" ", "| ").split("|") if word]

    assert encode_pair(words, "a b ", "c") == (words("a b"), words(" c"))
    assert encode_pair(words, "a b", " c d") == (words("a b"), words(" c d"))
    assert encode_pair(words, "", "c") == ([], words("c"))
