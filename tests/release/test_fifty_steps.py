"""The same fp32 run for fifty steps with Adam at 1, 2, 4 and 8 ranks; prints the loss curves side by side.

The gate is 1e-5 relative at every step, and 1e-6 at the first; 2e-7 is measured. A loss is a mean, so rounding of
single weights hardly shows; test_single_precision.py checks gradients. If the gradients of the tensor-parallel norms
are not summed, the curves part by more than the gate.

    python -m pytest -q -s tests/release/test_fifty_steps.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.equivalence.test_model_parallel import SP, layout, without_replica_sums
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import Recorder, flags, make_parts

FIRST, EVERY = 1e-6, 1e-5
SOON = 10
"""Steps after which a planted bug has long shown."""
SETTINGS: dict[str, Any] = {
    "num_layers": 4,
    "micro_batch_size": 2,
    "attention_dropout": 0,
    "hidden_dropout": 0,
    "train_iters": 50,
    "lr": 1e-3,
    "lr_warmup_iters": 5,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2 sp": (2, layout(tp=2, micro_batch_size=8, **SP)),
    "tp2 pp2": (4, layout(tp=2, pp=2, micro_batch_size=4, pipeline_schedule="zero-bubble")),
    "cp2 dp2": (4, layout(context_parallel_size=2, micro_batch_size=4)),
    "tp2 pp2 dp2": (8, layout(tp=2, pp=2, num_layers_per_virtual_pipeline_stage=1, **SP)),
}


def losses(rank: int, ranks: int, argv: list[str], planted: bool = False) -> list[float]:
    torch.set_num_threads(1)
    records: list[dict[str, Any]] = []
    _, parts = make_parts(argv, hooks=[Recorder(records)], rank=rank, world_size=ranks)
    if planted:
        without_replica_sums(parts)
    with parts:
        parts.trainer.fit(SOON if planted else None)
    return [record["lm_loss"] for record in records]


def at(ranks: int, axes: Mapping[str, Any], planted: bool = False) -> list[float]:
    argv = flags(**{**SETTINGS, **axes})
    return losses(0, 1, argv) if ranks == 1 else run_ranks(ranks, losses, ranks, argv, planted, timeout=180.0)[0]


def apart(curve: list[float], alone: list[float]) -> list[float]:
    return [abs(a / b - 1) for a, b in zip(curve, alone, strict=True)]


def test_the_curves_are_one_curve() -> None:
    alone = at(1, {})
    curves = {"1 rank": alone, **{name: at(ranks, axes) for name, (ranks, axes) in LAYOUTS.items()}}
    print("\nstep " + "".join(f"{name:>14}" for name in curves))
    for step in (1, 2, 5, 10, 20, 30, 40, 50):
        print(f"{step:4} " + "".join(f"{curve[step - 1]:14.7f}" for curve in curves.values()))
    print("apart" + "".join(f"{max(apart(curve, alone)):14.1e}" for curve in curves.values()))
    assert len(alone) == 50 and alone[-1] < alone[0], "nothing was learned"
    for name, curve in curves.items():
        assert apart(curve, alone)[0] < FIRST and max(apart(curve, alone)) < EVERY, name


def test_a_planted_bug_parts_the_curves() -> None:
    ranks, axes = LAYOUTS["tp2 sp"]
    assert max(apart(at(ranks, axes, planted=True), at(1, {})[:SOON])) > EVERY
