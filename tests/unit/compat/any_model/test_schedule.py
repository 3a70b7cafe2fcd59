"""Schedulers whose step() takes arguments: the engine passes `lr_kwargs` on, or asks for them before the update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron.compat import initialize
from megatron.compat.any_model import ModelEngine, schedule
from megatron.distributed.parallel_state import Axis
from megatron.errors import ConfigError

Plateau = torch.optim.lr_scheduler.ReduceLROnPlateau


def make(scheduler: Any, **config: Any) -> ModelEngine:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    given = {"train_batch_size": 4, **config}
    return initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler(optimizer), config=given)[0]


def step(engine: ModelEngine, **named: Any) -> None:
    engine.backward(engine(torch.ones(2, 4)).square().mean() * 1e-3)
    engine.step(**named)


def test_a_plateau_lowers_the_rate_as_torchs_own_loop_does() -> None:
    """Each update has two micro-batches; the metric of the first is ignored."""
    engine = make(lambda optimizer: Plateau(optimizer, patience=1), train_micro_batch_size_per_gpu=2)
    alone = Plateau(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), patience=1)
    for metric in (3.0, 2.0, 2.5, 2.5, 2.5, torch.tensor(2.5), 1.0):
        step(engine, lr_kwargs={"metrics": 99.0})
        step(engine, lr_kwargs={"metrics": metric})
        alone.step(metric)  # type: ignore[arg-type]
        assert engine.get_lr() == alone.get_last_lr()
    assert engine.get_lr() == [pytest.approx(0.01)]


def test_a_missing_argument_is_one_line_before_the_update() -> None:
    engine = make(Plateau)
    before = engine.module.weight.detach().clone()
    with pytest.raises(ConfigError, match=r"ReduceLROnPlateau, whose step\(\) needs metrics; .*lr_kwargs=") as error:
        step(engine)
    assert "\n" not in str(error.value) and engine.global_steps == 0
    assert torch.equal(before, engine.module.weight)
    engine.step(lr_kwargs={"metrics": 1.0})
    assert engine.global_steps == 1 and not torch.equal(before, engine.module.weight)


def test_ranks_give_one_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "all_gather_json", lambda value, *_: [value, "0.5"])
    scheduler, dp = Plateau(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)), Axis("dp", 0, 2, (0, 1), None)
    assert schedule.scheduler_arguments(scheduler, {"metrics": torch.tensor(0.5)}, dp)["metrics"] == 0.5
    with pytest.raises(ConfigError, match=r"'metrics'\] is 0.75 on rank 0 and 0.5 on rank 1.*all_reduce"):
        schedule.scheduler_arguments(scheduler, {"metrics": 0.75}, dp)


def test_a_scheduler_without_a_signature_is_stepped_bare() -> None:
    class Bare:
        steps = 0

        def step(self, *_: Any, **__: Any) -> None:
            self.steps += 1

    engine = make(lambda _: Bare())
    step(engine)
    assert engine.lr_scheduler.steps == 1
