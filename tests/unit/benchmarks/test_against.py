"""Results that benchmarks/against.py reads from both scripts."""

from __future__ import annotations

import pytest

from benchmarks.against import times


def test_times_of_contenders() -> None:
    assert times({"seconds": {"ours": [3.0, 1.0, 2.0], "plain": [4.0]}}) == {"ours": 2.0, "plain": 4.0}


def test_times_of_layouts_and_bubbles() -> None:
    layouts = [{"layout": "TP2", "ms_per_step": 5.0, "of_one_process": 1.5}]
    bubbles = [{"schedule": "1f1b", "bubble": 0.2, "theory": 0.1}]
    assert times({"layouts": layouts, "bubbles": bubbles}) == {"TP2": 5.0, "bubble of 1f1b": 0.2}


def test_a_result_of_another_script_is_no_result() -> None:
    with pytest.raises(KeyError):
        times({"rows": []})
