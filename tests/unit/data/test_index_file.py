"""The C++ checks of an .idx report the same as numpy's, wherever the damage is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.index_builders import Builders
from megatron.data.indexed import index_file
from megatron.data.indexed.index_file import check_documents, check_sequences
from megatron.errors import DataError

PATH = Path("some.idx")
HELPERS = Builders.resolve().helpers
needs_cpp = pytest.mark.skipif(HELPERS is None, reason="the C++ helpers are not built")


def unaligned(values: list[int], dtype: str) -> np.ndarray:
    """An array that is unaligned like a mapped file's: the header has 34 bytes."""
    array = np.array(values, dtype=dtype)
    raw = np.zeros(34 + array.nbytes, dtype=np.uint8)
    raw[34:] = array.view(np.uint8)
    return raw[34:].view(dtype)


def offsets_of(lengths: list[int], itemsize: int) -> list[int]:
    return [sum(lengths[:i]) * itemsize for i in range(len(lengths))]


def verdict(check: object, *args: object) -> object:
    try:
        return check(PATH, *args)  # type: ignore[operator]
    except DataError as error:
        return str(error)


@needs_cpp
@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), max_size=30),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    threads=st.integers(1, 9),
    damage=st.none() | st.tuples(st.booleans(), st.integers(0, 29), st.sampled_from([1, -1, 2**31, -(2**63), 2**62])),
)
def test_sequences(lengths: list[int], itemsize: int, threads: int, damage: tuple[bool, int, int] | None) -> None:
    assert HELPERS is not None
    short, offsets = unaligned(lengths, "<i4"), unaligned(offsets_of(lengths, itemsize), "<i8")
    if damage is not None and lengths:
        of_lengths, place, change = damage
        array = short if of_lengths else offsets
        with np.errstate(over="ignore"):
            array[place % len(array)] ^= np.array(change).astype(array.dtype)
    expected = verdict(index_file._walk_sequences, short, offsets, itemsize)
    total = HELPERS.sequence_bytes(short, offsets, itemsize, threads=threads)
    assert total == expected if total >= 0 else isinstance(expected, str)
    assert verdict(check_sequences, short, offsets, itemsize) == expected


@needs_cpp
@settings(max_examples=200, deadline=None)
@given(steps=st.lists(st.integers(-1, 3), max_size=30), threads=st.integers(1, 9))
def test_documents(steps: list[int], threads: int) -> None:
    assert HELPERS is not None
    documents = unaligned([0, *np.cumsum(steps, dtype=np.int64).tolist()], "<i8")
    assert HELPERS.never_falls(documents, threads=threads) == all(step >= 0 for step in steps)
    answer = verdict(check_documents, documents, sum(steps))
    assert (answer is None) == all(step >= 0 for step in steps)
    assert answer is None or "document index: entry " in str(answer)


@needs_cpp
@pytest.mark.parametrize("place", range(8))
def test_each_place_is_looked_at_by_some_thread(place: int) -> None:
    """A check that skipped the border between two threads would miss some of these."""
    assert HELPERS is not None
    lengths = [3] * 8
    for threads in range(1, 9):
        short, offsets = unaligned(lengths, "<i4"), unaligned(offsets_of(lengths, 2), "<i8")
        assert HELPERS.sequence_bytes(short, offsets, 2, threads=threads) == 48
        offsets[place] += 2
        assert HELPERS.sequence_bytes(short, offsets, 2, threads=threads) == -1
        offsets[place] -= 2
        short[place] = -3
        assert HELPERS.sequence_bytes(short, offsets, 2, threads=threads) == -1
        documents = unaligned(list(range(9)), "<i8")
        documents[place] = 9
        assert not HELPERS.never_falls(documents, threads=threads)


def test_without_cpp_the_same_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    numpy_only = Builders(None, "numpy: in this test")
    lengths, offsets = unaligned([3, -1, 2], "<i4"), unaligned([0, 6, 4], "<i8")
    documents = unaligned([0, 2, 1, 3], "<i8")
    before = verdict(check_sequences, lengths, offsets, 2), verdict(check_documents, documents, 3)
    monkeypatch.setattr(Builders, "resolve", classmethod(lambda cls: numpy_only))
    assert (verdict(check_sequences, lengths, offsets, 2), verdict(check_documents, documents, 3)) == before
    assert "length of sequence 1 is -1" in str(before[0]) and "entry 2 is 1, less than 2 before it" in str(before[1])
