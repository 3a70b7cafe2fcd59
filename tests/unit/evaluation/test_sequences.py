"""Windows: every token but the first is predicted once, with as much context as the stride leaves."""

from __future__ import annotations

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
    """Of 1 + targets tokens, ceil((targets - window) / stride) + 1 windows, the first of which scores a whole one."""
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


def test_the_rules_are_those_of_the_harness() -> None:
    theirs = pytest.importorskip("lm_eval.tasks.wikitext.preprocess_wikitext")
    pieces = (
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
        "[ d",
        "{ }",
    )
    random = np.random.default_rng(1)
    for _ in range(200):
        text = "".join(random.choice(pieces) + "word" * int(random.integers(2)) for _ in range(8))
        assert detokenize(text) == theirs.wikitext_detokenizer({"page": text}), repr(text)


def test_spaces_between_belong_to_the_target() -> None:
    def words(text: str) -> list[int]:  # a token per word, with the space before it
        return [hash(word) for word in text.replace(" ", "| ").split("|") if word]

    assert encode_pair(words, "a b ", "c") == (words("a b"), words(" c"))
    assert encode_pair(words, "a b", " c d") == (words("a b"), words(" c d"))
    assert encode_pair(words, "", "c") == ([], words("c"))
