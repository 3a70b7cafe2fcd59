"""Sharded weights (ZeRO 2 and 3): evaluation only, weights only, checks, and a user's own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.data_parallel import FullySharded
from megatron.distributed.parallel_state import ParallelState
from megatron.errors import ConfigError, NonFiniteError
from megatron.layout import Layout
from megatron.parallelize.divide import units_of
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import flags, make_parts

SMALL: dict[str, Any] = {"bf16": True, "train_iters": 2, "eval_iters": 1, "eval_interval": 1, "kernels": "ref"}


def train(rank: int, argv: list[str]) -> tuple[dict[str, Tensor], list[float]]:
    """Whole weights after a run, and the losses of its evaluation."""
    torch.set_num_threads(1)
    _, parts = make_parts(argv, rank=rank, world_size=2)
    with parts:
        if parts.trainer_if_any is not None:
            parts.trainer.fit()
        losses = [result.lm_loss for result in [parts.evaluator.valid(parts.progress, "the end")] if result]
        return {name: tensor.detach().clone() for name, tensor in parts.engine.whole_weights()}, losses


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_with_checks_evaluations_and_saves(stage: int, tmp_path: Path) -> None:
    saved = flags(**SMALL, zero_stage=stage, check_replicas_every=1, save=tmp_path, save_interval=2)
    trained = run_ranks(2, train, saved)
    others = {"train_iters": None, "lr": None, "skip_train": True, "load": tmp_path}
    for settings in ({**others, "zero_stage": stage}, {**others, "zero_stage": 0}):
        for (weights, _), (held, _) in zip(trained, run_ranks(2, train, flags(**SMALL | settings)), strict=True):
            assert weights.keys() == held.keys()
            assert all(torch.equal(weights[name], tensor) for name, tensor in held.items())
    tuned = run_ranks(
        2, train, flags(**SMALL | {"train_iters": 1, "lr": 0.0}, zero_stage=stage, finetune=True, load=tmp_path)
    )
    assert all(torch.equal(trained[0][0][name], tensor) for name, tensor in tuned[0][0].items())


def train_on_bad_weights(rank: int, argv: list[str]) -> str:
    torch.set_num_threads(1)
    _, parts = make_parts(argv, rank=rank, world_size=2)
    with parts:
        if rank == 1:
            parts.trainer.engine.store.weight("layers.1.mlp.dense_h_to_4h.weight")[3] = float("nan")
        try:
            parts.trainer.fit()
        except NonFiniteError as error:
            return str(error)
    return "nothing is said"


def test_a_shard_that_is_not_finite_is_named() -> None:
    for said in run_ranks(2, train_on_bad_weights, flags(**SMALL, zero_stage=3)):
        assert "first non-finite parameters of rank 1: layers.1.mlp.dense_h_to_4h.weight" in said


class Foreign(nn.Module):
    """Layers in a list, a row count that the ranks do not divide, a frozen parameter and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(5, 1, bias=False)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x * self.frozen)
        return self.head(x).sum()


def sgd_of_foreign(rank: int, size: int, keep_gathered: bool) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Foreign().double()
    state = ParallelState.build(Layout(size), rank)
    sharded = FullySharded(list(units_of(model, state.dp)), keep_gathered=keep_gathered, device=torch.device("cpu"))
    for step in range(3):
        sharded.zero()
        for batch in range(2):
            model(torch.full((2, 5), float(step + batch + rank), dtype=torch.float64)).backward()
        sharded.reduce()
        with torch.no_grad():
            for name, grad in sharded.grads():
                sharded.weight(name).sub_(0.1 * grad)
        sharded.publish()
    return {name: sharded.whole_weight(name) for name in sharded.all_names}


def plain_sgd(size: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Foreign().double()
    for step in range(3):
        model.zero_grad()
        for batch in range(2):
            for rank in range(size):
                model(torch.full((2, 5), float(step + batch + rank), dtype=torch.float64)).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad)
    return dict(model.named_parameters())


@pytest.mark.parametrize(("size", "keep_gathered"), [(2, True), (4, False)])
def test_a_model_that_is_not_ours(size: int, keep_gathered: bool) -> None:
    wanted = plain_sgd(size)
    for found in run_ranks(size, sgd_of_foreign, size, keep_gathered):
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            assert (tensor - wanted[name]).abs().max() < 1e-12, name


def two_types(rank: int) -> str:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    state = ParallelState.build(Layout(2), rank)
    with pytest.raises(ConfigError) as caught:
        FullySharded(list(units_of(model, state.dp)), keep_gathered=False, device=torch.device("cpu"))
    return str(caught.value)


def test_weights_of_two_types_are_refused() -> None:
    for said in run_ranks(2, two_types):
        assert "bfloat16 and float32" in said and "use --zero-stage 1" in said
