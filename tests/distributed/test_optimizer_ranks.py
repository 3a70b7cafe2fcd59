"""Whole steps on several ranks equal one process, equal each other, and handle bad numbers alike."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from megatron.config.sections.optimizer import OptimizerConfig
from megatron.config.sections.precision import PrecisionConfig
from megatron.data_parallel import BucketStore
from megatron.distributed.parallel_state import Axis, ParallelState
from megatron.engine.nonfinite import nonfinite_grads
from megatron.layout import Layout
from megatron.optimizer import Optimizer
from megatron.optimizer.norms import CountedParts
from tests.helpers.distributed import run_ranks

SAMPLES, STEPS, CONFIG = 8, 5, OptimizerConfig(clip_grad=0.5)
Trace = tuple[list[float], dict[str, torch.Tensor]]


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 4)).to(dtype)


def train(dp: Axis, dtype: torch.dtype, micro_batches: int) -> Trace:
    """Norms of every step, and the weights after the last."""
    model = make_model(dtype)
    grads = BucketStore(model.named_parameters(), dp, bucket_size=50, overlap=True)
    optimizer = Optimizer(grads, CONFIG, PrecisionConfig(bf16=dtype == torch.bfloat16))
    norms = []
    for step in range(STEPS):
        x = torch.randn(SAMPLES, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step)).to(dtype)
        mine = x.chunk(dp.size)[dp.rank]
        grads.zero()
        for index, micro in enumerate(mine.chunk(micro_batches)):
            if index == micro_batches - 1:
                grads.arm()
            (model(micro) ** 2).sum().backward()
        grads.reduce()
        norms.append(optimizer.step(1e-2, 0.1).grad_norm)
    return norms, {name: p.detach().clone() for name, p in model.named_parameters()}


def on_rank(rank: int, world: int, dtype: torch.dtype, micro_batches: int) -> Trace:
    return train(ParallelState.build(Layout(world), rank).dp, dtype, micro_batches)


@pytest.mark.parametrize(("world", "micro_batches"), [(2, 1), (2, 4), (4, 2)])
def test_five_steps_equal_one_process(world: int, micro_batches: int) -> None:
    wanted_norms, wanted = train(Axis.single("dp"), torch.float64, 1)
    assert min(wanted_norms) > CONFIG.clip_grad, "the case must clip"
    for norms, found in run_ranks(world, on_rank, world, torch.float64, micro_batches):
        assert norms == pytest.approx(wanted_norms, rel=1e-10)
        assert all(((found[n] - w).norm() / w.norm()).item() < 1e-10 for n, w in wanted.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_stay_bit_equal(dtype: torch.dtype) -> None:
    (norms, first), *others = run_ranks(4, on_rank, 4, dtype, 2)
    for other_norms, other in others:
        assert other_norms == norms and all(torch.equal(other[name], first[name]) for name in first)


def split_norm(rank: int) -> tuple[float, int, float]:
    """Norm where `split` is halved over tp and `whole` is copied; each element counts once."""
    state = ParallelState.build(Layout(4, tp=2), rank)
    model = nn.ParameterDict({"split": torch.zeros(3), "whole": torch.zeros(2)}).double()
    grads = BucketStore(model.named_parameters(), state.dp)
    optimizer = Optimizer(grads, CONFIG, PrecisionConfig(), split_over={"split": (state.tp,)})
    full = torch.tensor([1.0, 2.0, 0.0, 4.0, 0.0, 6.0], dtype=torch.float64)
    grads.grad("split").copy_(full.chunk(2)[state.tp.rank] / 2)  # two data-parallel ranks add up to `full`
    grads.grad("whole").copy_(torch.tensor([3.0, 0.0]) / 2)
    grads.reduce()
    zeros = optimizer.count_zeros().item()
    return optimizer.step(0.1, 0.0).grad_norm, zeros, optimizer.params_norm().item()


def test_norms_over_split_and_copied_tensors() -> None:
    results = run_ranks(4, split_norm)
    assert len(set(results)) == 1
    norm, zeros, params = results[0]
    assert norm == pytest.approx(math.sqrt(1 + 4 + 16 + 36 + 9), rel=1e-14)
    assert zeros == 3
    assert params == pytest.approx(0.1 * math.sqrt(5), rel=1e-6), "Adam's first step is lr for each nonzero gradient"


def test_planted_bug_a_copied_tensor_counted_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    by_axes = CountedParts.__call__

    def everything_is_split(self: CountedParts, tensors: Any, counted: bool = True) -> object:
        axes = max(self._axes, key=len)
        return {axes: [tensor for group in by_axes(self, tensors, counted).values() for tensor in group]}

    monkeypatch.setattr(CountedParts, "__call__", everything_is_split)
    assert run_ranks(4, split_norm)[0][0] != pytest.approx(math.sqrt(66), rel=1e-3)


def one_bad_rank(rank: int, split: bool) -> tuple[bool, list[str], float]:
    """One rank's gradient has a NaN: all ranks skip, because of the sum or because of the norm."""
    state = ParallelState.build(Layout(2, tp=2 if split else 1), rank)
    model = nn.ParameterDict({"a": torch.ones(3), "b": torch.ones(3)})
    grads = BucketStore(model.named_parameters(), state.dp)
    optimizer = Optimizer(
        grads, CONFIG, PrecisionConfig(), split_over={"a": (state.tp,), "b": (state.tp,)} if split else {}
    )
    if rank == 1:
        grads.grad("b")[1] = math.nan
    grads.reduce()
    info = optimizer.step(0.1, 0.1)
    return info.skipped, nonfinite_grads(optimizer.store), model["a"].sum().item()


@pytest.mark.parametrize("split", [False, True])
def test_all_ranks_skip_when_one_is_bad(split: bool) -> None:
    one, two = run_ranks(2, one_bad_rank, split)
    assert one == (True, [] if split else ["b"], 3.0)
    assert two == (True, ["b"], 3.0)
