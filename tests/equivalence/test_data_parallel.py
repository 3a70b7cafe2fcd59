"""Every data-parallel layout and micro-batch size trains what one process trains: fp64, 1e-10, every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.engine import Engine
from tests.helpers.distributed import RankFailed
from tests.helpers.layouts import at_layout, expected, unequal, worst
from tests.helpers.runs import LLAMA_SHAPE, flags

EQUAL = 1e-10
SEEN = 1e-6

GPT2: dict[str, Any] = {"attention_dropout": 0, "hidden_dropout": 0, "optimizer": "sgd"}
LLAMA: dict[str, Any] = {
    **GPT2,
    **LLAMA_SHAPE,
    "num_query_groups": 2,
    "group_query_attention": True,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
}
OVERLAPPED = {"micro_batch_size": 1, "overlap_grad_reduce": True}


def micro_batches(*sizes: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(family, {"micro_batch_size": size}) for size in sizes for family in (GPT2, LLAMA)]


CASES: dict[int, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    1: micro_batches(1, 8),
    2: [*micro_batches(2, 4), (GPT2, OVERLAPPED)],
    4: [*micro_batches(1, 2), (GPT2, OVERLAPPED)],
}


@pytest.mark.parametrize("ranks", CASES)
def test_every_layout_is_the_single_process(ranks: int) -> None:
    assert not unequal(ranks, CASES[ranks], EQUAL)


# What the suite is worth: each planted bug must be seen.


def no_reduction(engine: Engine) -> None:
    engine.store.reduce = lambda: None  # type: ignore[method-assign]


def mean_of_means(engine: Engine) -> None:
    forward = engine.passes.forward_step

    def wrong(model: Any, batch: Any) -> Any:
        total, count = forward(model, batch)
        return total / count * 32, torch.tensor(32.0)

    engine.passes.forward_step = wrong


def doubled_reduction(engine: Engine) -> None:
    reduce = engine.store.reduce

    def twice() -> None:
        reduce()
        engine.store.multiply(2.0)

    engine.store.reduce = twice  # type: ignore[method-assign]


def local_token_count(engine: Engine) -> None:
    engine._sum_over_ranks = lambda totals: totals  # type: ignore[method-assign]


@pytest.mark.parametrize("bug", [no_reduction, mean_of_means, doubled_reduction, local_token_count])
def test_planted_bugs_are_seen(bug: Callable[[Engine], None]) -> None:
    try:
        outcome = at_layout(2, flags(**GPT2), lambda parts: bug(parts.trainer.engine))
    except AssertionError as disagreement:  # of the ranks among each other
        assert not isinstance(disagreement, RankFailed), disagreement  # a bug that crashes or hangs proves nothing
        return
    assert worst(outcome, expected(tuple(flags(**GPT2)))) > SEEN
