"""Wrong values at random places of JSON content, for readers of untrusted files."""

from __future__ import annotations

import copy
import json
import random
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from megatron.errors import MegatronError

WRONG: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 2**31, 2**63, 10**9, 10**30, -(10**30), 0.5, -0.0, 1e308, float("nan")),
    *(float("inf"), "", "x", "1", "../x", "\x00", "\ud800", "é" * 300, [], {}, [[]], [None], [0, 0], {"x": None}),
    *([[1, 2]], ["x"], [1] * 1000, [-1, 5], {"0": 1}, [[[[]]]]),
)
NESTED = "[" * 100_000
SECONDS = 60  # one mutation that takes longer hangs


def _places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in list(inner)[:200]:
        yield (*path, key)
        yield from _places(value, (*path, key))


def mutated(content: Any, count: int, seed: int) -> Iterator[Any]:
    """Copies of the content with one or two mistakes: a wrong value, a missing or an added key."""
    choose, places = random.Random(seed), list(_places(content))
    by_depth: dict[int, list[tuple[Any, ...]]] = {}
    for place in places:
        by_depth.setdefault(len(place), []).append(place)
    for _ in range(count):
        changed = copy.deepcopy(content)
        for _ in range(choose.choice((1, 1, 2))):
            *parents, last = choose.choice(by_depth[choose.choice(list(by_depth))])
            try:
                holder = changed
                for key in parents:
                    holder = holder[key]
                if choose.random() < 0.15:
                    del holder[last]
                elif choose.random() < 0.1 and isinstance(holder, dict):
                    holder[choose.choice(("x", "", "auto_map", "0"))] = copy.deepcopy(choose.choice(WRONG))
                else:
                    holder[last] = copy.deepcopy(choose.choice(WRONG))
            except (KeyError, IndexError, TypeError):
                pass  # the first change took the place away
        yield changed


def texts(content: Any, count: int, seed: int) -> Iterator[str]:
    """Mutations as JSON, and texts that are not JSON or too large."""
    whole = json.dumps(content)
    yield from ("", "[]", "null", '"x"', "{", NESTED, '{"x":' * 100_000, '{"x": ' + "1" * 5000 + "}", whole[:-1])
    for changed in mutated(content, count, seed):
        yield json.dumps(changed)


def only_our_errors(read: Callable[[Any], object], inputs: Iterator[Any]) -> tuple[int, int]:
    """Reads each input; failures must be short one-line errors of the project. Returns (read, rejected) counts."""

    def hangs(_number: int, _frame: FrameType | None) -> None:
        raise AssertionError(f"reading takes more than {SECONDS} s")

    taken = refused = 0
    before = signal.signal(signal.SIGALRM, hangs)
    try:
        for given in inputs:
            signal.alarm(SECONDS)
            try:
                read(given)
                taken += 1
            except MegatronError as error:
                refused += 1
                line = str(error)
                assert "\n" not in line and line and len(line) < 3000, line[:3000]
                line.encode()
            except Exception as error:
                raise AssertionError(f"{type(error).__name__} ({error}) at {str(given)[:2000]!r}") from error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return taken, refused
