"""Dropout over tensor-parallel ranks: one mask for copies, a mask per rank for split tensors. Recomputation draws the
same masks; test_parallel_checkpoints.py checks that a resumed run continues the stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.distributed import rng
from megatron.distributed.parallel_state import ParallelState
from megatron.layout import Layout
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import whole_tensors
from tests.helpers.runs import flags, make_parts

RATES = {"hidden_dropout": 0.3, "attention_dropout": 0.3}
TP = {"tensor_model_parallel_size": 2}
SP = {**TP, "sequence_parallel": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
SELECTIVE = {"recompute_granularity": "selective"}


class Masks(TorchDispatchMode):
    """Kept places of each dropout by kind; attention probabilities are the square ones."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[Tensor]] = {"hidden": [], "attention": []}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        name = op.name()
        if name.startswith(("aten::bernoulli", "aten::native_dropout")):
            mask = result[1] if isinstance(result, tuple) else result
            self.seen["attention" if mask.shape[-1] == mask.shape[-2] else "hidden"].append(mask != 0)
        return result


def masks(rank: int, argv: list[str]) -> dict[str, list[Tensor]]:
    torch.set_num_threads(1)
    _, parts = make_parts(argv, rank=rank, world_size=2, dtype=torch.float64)
    with parts, Masks() as masks:
        parts.trainer.iterate()
    return masks.seen


def agreement(sequence_parallel: bool) -> dict[str, list[float]]:
    """Share of places where the two ranks' masks agree."""
    one, other = run_ranks(2, masks, flags(**RATES, **(SP if sequence_parallel else TP), kernels="ref"))
    assert all(one.values()) and {k: len(v) for k, v in one.items()} == {k: len(v) for k, v in other.items()}
    return {what: [(a == b).float().mean().item() for a, b in zip(one[what], other[what])] for what in one}


def test_copies_drop_alike_and_split_heads_do_not() -> None:
    same = agreement(sequence_parallel=False)
    assert set(same["hidden"]) == {1.0}
    assert all(share < 0.8 for share in same["attention"]), "0.58 by chance"


def test_pieces_of_the_sequence_drop_by_themselves() -> None:
    same = agreement(sequence_parallel=True)
    assert all(share < 0.8 for what in same.values() for share in what)


def after_a_step(rank: int, ranks: int, cases: list[list[str]]) -> list[Any]:
    torch.set_num_threads(1)
    results = []
    for argv in cases:
        _, parts = make_parts(argv, rank=rank, world_size=ranks, dtype=torch.float64)
        with parts:
            loss = [parts.trainer.iterate().lm_loss for _ in range(2)]  # type: ignore[union-attr]
            specs, grads = parts.checkpoints.specs, parts.trainer.engine.store
            results.append((loss, {name: (specs[name], grad.clone()) for name, grad in grads.grads()}))
    return results


@pytest.mark.parametrize("axes", [TP, SP, {**SP, "pipeline_model_parallel_size": 2, "num_layers": 4}], ids=str)
def test_what_is_computed_again_drops_the_same(axes: dict[str, Any]) -> None:
    """Losses of two steps and the second's gradients, bit for bit."""
    ranks = 4 if "pipeline_model_parallel_size" in axes else 2
    cases = [flags(**RATES, **axes, **recompute) for recompute in ({}, FULL, SELECTIVE)]
    plain, *recomputed = zip(*run_ranks(ranks, after_a_step, ranks, cases), strict=True)
    for again in recomputed:
        assert [loss for loss, _ in again] == [loss for loss, _ in plain]
        first, second = (whole_tensors([grads for _, grads in run], agree_to=1e-12) for run in (plain, again))
        assert all(torch.equal(first[name], second[name]) for name in first) and first


def draws(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random numbers before, inside and after a fork."""
    torch.manual_seed(5)
    stream = rng.SplitRandom(ParallelState.build(Layout(2, tp=2), rank).tp)
    before = torch.rand(4)
    with stream.fork():
        inside = torch.rand(4)
    return before, inside, torch.rand(4)


def test_after_a_fork_the_ranks_are_together_again() -> None:
    (a, own, c), (d, other, f) = run_ranks(2, draws)
    assert torch.equal(a, d) and torch.equal(c, f) and not torch.equal(own, other)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_planted_bug_one_stream_for_all_is_seen(monkeypatch: pytest.MonkeyPatch, sequence_parallel: bool) -> None:
    monkeypatch.setattr(rng, "stream_seed", lambda seed, *names: 7)
    same = agreement(sequence_parallel)
    assert set(same["attention"]) == {1.0}
