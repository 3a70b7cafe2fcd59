"""The table of sources is complete if short; otherwise it has the largest and most repeated, and correct sums."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.table import MixtureRow, abbreviated, refuse_repeated, render_mixture, warn_repeated
from megatron.errors import ConfigError


def row(number: int, samples: int = 10, epochs: float = 0.5, tokens: int = 1000, split: str = "train") -> MixtureRow:
    return MixtureRow(split, f"s{number}", 1 / 64, 5, tokens, samples, epochs)


def test_short_tables_are_whole() -> None:
    rows = [row(n) for n in range(20)]
    assert abbreviated(rows) == rows


@given(st.lists(st.tuples(st.integers(0, 999), st.integers(1, 999)), min_size=21, max_size=60), st.integers(0, 60))
def test_nothing_is_lost_in_the_sums(numbers: list[tuple[int, int]], validation: int) -> None:
    seq = 8
    rows = [
        row(n, samples, samples * seq / tokens, tokens, "train" if n >= validation else "valid")
        for n, (samples, tokens) in enumerate(numbers)
    ]
    shown = abbreviated(rows)
    assert len(shown) <= 2 * 9
    for split in {row.split for row in rows}:
        own, kept = ([row for row in some if row.split == split] for some in (rows, shown))
        named = [row for row in kept if row in own]
        sums = [row for row in kept if row.source.startswith("all ")]
        assert sorted(row.samples for row in own)[-3:] == sorted(row.samples for row in named)[-3:] or len(own) < 3
        assert max(own, key=lambda row: row.epochs).epochs == max(named, key=lambda row: row.epochs).epochs
        rest = [row for row in kept if row.source.startswith("... ")]
        assert sum(row.samples for row in [*named, *rest]) == sum(row.samples for row in own)
        assert sum(row.tokens for row in [*named, *rest]) == sum(row.tokens for row in own)
        if len(own) > 1:
            assert sums[0].epochs == pytest.approx(sums[0].samples * seq / sums[0].tokens)


def test_lines() -> None:
    lines = render_mixture(abbreviated([row(n, samples=n) for n in range(2000)])).splitlines()
    assert lines[-2].split()[:4] == ["train", "...", "1,993", "more"]
    assert lines[-1].split()[:4] == ["train", "all", "2,000", "sources"]


def test_repeated_sources_are_warned_of_and_refused() -> None:
    rows = [row(1, epochs=4.0), row(2, epochs=165.2), row(3, epochs=4.5), row(4, epochs=500, split="valid")]
    (warning,) = warn_repeated(rows)
    assert warning.startswith("training reads s2 165.2 times (and 1 other source more than 4 times)")
    assert list(warn_repeated(rows[:1])) == []
    refuse_repeated(rows, None)
    refuse_repeated(rows, 166)
    message = "--max-epochs 5: training would read s2 165.20 times (weight 0.01562, 1,000 tokens, 10 samples); add"
    with pytest.raises(ConfigError, match=re.escape(message)):
        refuse_repeated(rows, 5)
    with pytest.raises(ConfigError, match=", and 2 other sources too often"):
        refuse_repeated(rows, 3.9)
