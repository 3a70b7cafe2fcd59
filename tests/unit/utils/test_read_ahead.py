"""Prefetching gives the same items and the same end, and leaves no thread behind."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator

import pytest

from megatron.errors import DataError
from megatron.utils.read_ahead import ReadAhead


def test_same_items_then_the_same_end() -> None:
    ahead = ReadAhead(iter(range(100)), depth=3)
    assert list(ahead) == list(range(100))
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(ahead)


def test_an_error_comes_where_its_item_would_have_been() -> None:
    def source() -> Iterator[int]:
        yield 1
        yield 2
        raise DataError("here")

    ahead = ReadAhead(source(), depth=10)
    assert [next(ahead), next(ahead)] == [1, 2]
    for _ in range(2):
        with pytest.raises(DataError, match="here"):
            next(ahead)


@pytest.mark.parametrize("depth", [1, 4])
def test_never_further_ahead_than_asked(depth: int) -> None:
    taken: list[int] = []
    seen = threading.Semaphore(0)

    def source() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            seen.release()
            yield number

    ahead = ReadAhead(source(), depth=depth)
    for used in range(20):
        for _ in range(depth if used == 0 else 1):
            assert seen.acquire(timeout=10)  # it does read that far by itself
        assert len(taken) == depth + used
        assert next(ahead) == used
    ahead.stop(10)


@pytest.mark.parametrize("how", ["stop", "forget"])
def test_the_thread_ends(how: str) -> None:
    ahead = ReadAhead(iter(range(10**9)), depth=2)
    thread = ahead._thread
    next(ahead)
    if how == "stop":
        ahead.stop(10)
    else:
        del ahead
        gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_the_thread_itself_may_be_who_forgets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage collection runs in whichever thread creates an object."""
    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: unraisable.append(found.exc_value))
    only_here: list[ReadAhead[int]] = []
    handed_over = threading.Event()

    def source() -> Iterator[int]:
        handed_over.wait(10)
        only_here.clear()
        while True:
            yield 1

    only_here.append(ReadAhead(source(), depth=2))
    thread = only_here[0]._thread
    handed_over.set()
    thread.join(10)
    assert not thread.is_alive() and not only_here and unraisable == []


def test_a_source_that_hangs_is_not_waited_for() -> None:
    hanging = threading.Event()

    def source() -> Iterator[int]:
        hanging.wait(60)
        yield 1

    ahead = ReadAhead(source(), depth=2)
    ahead.stop(0.05)
    assert ahead._thread.is_alive() and ahead._thread.daemon
    hanging.set()
    ahead._thread.join(10)
    assert not ahead._thread.is_alive()


def test_ready_tells_whether_an_item_or_the_end_is_there() -> None:
    may_go_on = threading.Event()

    def source() -> Iterator[int]:
        yield 1
        may_go_on.wait(60)

    ahead = ReadAhead(source(), depth=2)
    assert ahead.ready.poll(10) and next(ahead) == 1
    assert not ahead.ready.poll(0)
    may_go_on.set()
    assert ahead.ready.poll(10) and list(ahead) == []
