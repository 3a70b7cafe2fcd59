from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.split import parse_split
from megatron.data.splits import sample_counts, split_bounds

DEFAULT = "969, 30, 1"


@pytest.mark.parametrize(
    ("text", "sequences", "rule", "bounds"),
    [
        (DEFAULT, 500, "23.06", (0, 485, 500, 500)),
        (DEFAULT, 500, "main", (0, 484, 500, 500)),
        (DEFAULT, 12345, "23.06", (0, 11963, 12333, 12345)),
        (DEFAULT, 12345, "main", (0, 11962, 12333, 12345)),
        (DEFAULT, 16, "23.06", (0, 16, 16, 16)),
        (DEFAULT, 3, "23.06", (0, 3, 3, 3)),
        (DEFAULT, 3, "main", (0, 3, 3, 3)),
        (DEFAULT, 0, "23.06", (0, 0, 0, 0)),
        ("98/2/0", 100, "23.06", (0, 98, 100, 100)),
        ("1", 7, "main", (0, 7, 7, 7)),
        ("0,1,1", 3, "23.06", (0, 0, 1, 3)),  # Megatron starts at -1 here, with a document of the test split
    ],
)
def test_bounds(text: str, sequences: int, rule: str, bounds: tuple[int, ...]) -> None:
    assert split_bounds(parse_split(text), sequences, rule) == bounds


def oracle_23_06(numbers: list[float], size: int) -> list[int]:
    total = 0.0
    for number in numbers:
        total = total + number
    index = [0]
    for k, number in enumerate(numbers):
        index.append(index[k] + round(number / total * float(size)))
    difference = index[-1] - size
    return [0] + [bound - difference for bound in index[1:]]


@given(numbers=st.lists(st.integers(0, 1000), min_size=3, max_size=3).filter(any), size=st.integers(0, 10**7))
def test_the_rule_of_23_06(numbers: list[int], size: int) -> None:
    expected = oracle_23_06([float(number) for number in numbers], size)
    got = split_bounds(parse_split(",".join(map(str, numbers))), size)
    assert list(got) == [max(0, bound) for bound in expected]
    assert got[-1] == size and list(got) == sorted(got)


def test_sample_counts() -> None:
    common = {"eval_interval": 200, "eval_iters": 10, "global_batch_size": 192}
    assert sample_counts(train_iters=1000, train_samples=None, **common) == (192000, 6 * 10 * 192, 1920)
    assert sample_counts(train_iters=None, train_samples=192001, **common) == (192001, 6 * 10 * 192, 1920)
    assert sample_counts(train_iters=399, train_samples=7, **common) == (7, 2 * 1920, 1920)  # a ramped-up batch
    assert sample_counts(train_iters=10, train_samples=None, eval_interval=None, eval_iters=0, global_batch_size=4) == (
        40,
        0,
        0,
    )
