"""Contenders take turns: one that fails is left out with the reason, and the others continue."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from benchmarks.parts.turns import Contenders, NotInstalledError, Turn, rotated, speed_over


def prepare(kind: str) -> Turn:
    """Defined at the top level, because another process imports it."""
    if kind == "not installed":
        raise NotInstalledError("transformers is not installed")

    def turn(steps: int) -> dict[str, Any]:
        if kind == "raises":
            raise RuntimeError("CUDA out of memory\nand a second line")
        if kind == "dies":
            os._exit(3)
        if kind == "hangs":
            time.sleep(600)
        return {"steps": steps}

    return turn


@pytest.fixture
def contenders() -> Iterator[Contenders]:
    made = Contenders()
    yield made
    made.close(patience=0)


def test_who_cannot_go_on_is_left_out(contenders: Contenders) -> None:
    kinds = ("not installed", "raises", "dies", "hangs", "works")
    for kind in kinds:
        contenders.start(kind, partial(prepare, kind))
    ready = {kind: contenders.answer(kind) for kind in kinds}
    assert ready == {**{kind: {} for kind in kinds}, "not installed": None}
    asked = [kind for kind in kinds if kind in contenders.names]
    for kind in asked:
        contenders.ask(kind, 3)
    assert {kind: contenders.answer(kind, 5) for kind in asked} == {**dict.fromkeys(asked), "works": {"steps": 3}}
    assert contenders.left_out == {
        "not installed": "transformers is not installed",
        "raises": "RuntimeError: CUDA out of memory",
        "dies": "its process ended with exit code 3",
        "hangs": "no answer within the remaining 5 s",
    }
    assert contenders.names == ["works"] and contenders.turn("works", 1) == {"steps": 1}


def test_turns_and_ratios() -> None:
    assert [rotated(["a", "b", "c"], number) for number in (0, 1, 5)] == [list("abc"), list("bca"), list("cab")]
    assert rotated([], 3) == []
    times = {"ours": [1.0, 2.0, 4.0], "peer": [2.0, 3.0]}
    assert speed_over(times, "peer") == [2.0, 1.5] and speed_over({"peer": [1.0]}, "peer") == []
