"""A small run measures the memory that a rank keeps at each stage of ZeRO; the formula predicts it."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.memory import compare

SMALL = {"layers": 2, "hidden": 64, "heads": 4, "seq": 16, "vocab": 256, "micro": 1, "kernels": "ref"}


@pytest.mark.parametrize(("bf16", "stages"), [(False, [0, 1, 2, 3]), (True, [0, 3])])
def test_what_a_rank_keeps_is_what_the_formula_says(bf16: bool, stages: list[int]) -> None:
    rows = compare(argparse.Namespace(**SMALL, ranks=[2], stages=stages, bf16=bf16))
    ours, alone = rows[: len(stages)], rows[len(stages) :]
    assert all(row["off"] < 0.05 for row in ours), rows
    assert all(0 < row["predicted"] <= row["activations"] for row in ours)
    gathered = [row["gathered"] for row in ours]
    assert gathered[0] == 0 < gathered[-1]
    if not bf16:
        kinds = ("parameters", "gradients", "optimizer", "gathered")
        assert all(ours[3][kind] <= alone[0][kind] for kind in kinds), "no more than fully_shard alone"
        assert ours[2]["gathered"] > gathered[3], "at stage 2 all weights stay"
        assert len({row["activations"] for row in ours}) == 1
