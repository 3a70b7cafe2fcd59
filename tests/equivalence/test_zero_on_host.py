"""ZeRO 3 with parameters, gradients and update on the host, by torch's offload policy: fp64, against the plain
optimizer in one process. The ranks compute on the CPU, so nothing is copied; tests/cluster/test_offload.py shows the
copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.data_parallel.shard_grads import OnHost
from megatron.optimizer import build_update as choosing
from megatron.optimizer.update_rules import DecidedOnHost
from megatron.parallelize import divide_weights
from megatron.prove.check_layout.outcome import RankOutcome, join, train_outcome
from megatron.training import model as modelling
from tests.equivalence.test_zero_stages import FULL, LLAMA, SHAPE, STEPS, plain
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import worst
from tests.helpers.runs import flags, make_parts

SGD = {"optimizer": "sgd"}
CASES: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = [(LLAMA, FULL), (SGD, {})]
Plant = Callable[[pytest.MonkeyPatch], None]


def train(
    rank: int, world: int, cases: Sequence[tuple[list[str], Plant | None]], dtype: torch.dtype
) -> list[RankOutcome]:
    torch.set_num_threads(1)
    outcomes = []
    for argv, plant in cases:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(modelling, "divide_weights", divide_on_host)
            patch.setattr("megatron.optimizer.optimizer.build_update", on_host)
            if plant is not None:
                plant(patch)
            _, parts = make_parts(argv, rank=rank, world_size=world, dtype=dtype)
            with parts:
                assert isinstance(parts.engine.divided._grads, OnHost)  # type: ignore[union-attr]
                outcomes.append(train_outcome(parts, STEPS))
    return outcomes


def divide_on_host(*args: Any, **options: Any) -> Any:
    return divide_weights(*args, **{**options, "on_host": True})


def on_host(grads: Any, config: Any, rules: Any, specs: Any, kernels: Any, *_: Any) -> Any:
    return choosing._on_host(grads, config, rules, specs, kernels.adamw)


def test_equals_the_plain_optimizer() -> None:
    argvs = [(flags(**SHAPE, **model, zero_stage=3, **layout), None) for model, layout in CASES]
    results = run_ranks(2, train, 2, argvs, torch.float64, timeout=180.0)
    for number, (model, _) in enumerate(CASES):
        wanted, got = plain(tuple(flags(**SHAPE, **model))), join([rank[number] for rank in results])
        if model is LLAMA:  # AdamW on the host leaves gradients as they are; the plain one clips them in place
            got = replace(got, gradients=wanted.gradients)
        found = worst(got, wanted)
        assert found < 1e-10, (model, found)


def gradients_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OnHost, "zero", lambda grads: None)


def a_gradient_that_is_a_copy(patch: pytest.MonkeyPatch) -> None:
    """Planted bug: clipping is lost."""
    patch.setattr(OnHost, "multiply", lambda grads, factor: None)


def no_update_without_clipping(patch: pytest.MonkeyPatch) -> None:
    step = DecidedOnHost.step

    def skip(update: DecidedOnHost, decision: Any, rates: Any) -> None:
        if decision.clipped:
            step(update, decision, rates)

    patch.setattr(DecidedOnHost, "step", skip)


PLANTS: list[tuple[Plant, Mapping[str, Any]]] = [
    (gradients_of_the_step_before, SGD),
    (a_gradient_that_is_a_copy, {**SGD, "clip_grad": 0.1}),
    (no_update_without_clipping, {**SGD, "clip_grad": 100.0}),
]


def test_planted_mistakes_are_seen() -> None:
    argvs = [(flags(**SHAPE, **model, zero_stage=3), plant) for plant, model in PLANTS]
    results = run_ranks(2, train, 2, argvs, torch.float64, timeout=180.0)
    for number, (plant, model) in enumerate(PLANTS):
        found = worst(join([rank[number] for rank in results]), plain(tuple(flags(**SHAPE, **model))))
        assert found > 1e-6, plant.__name__
