"""Hooks, parametrizations and adapters that a program adds to a model before `initialize()`. Each has the effect that
it has in a plain torch loop over the whole batch, at every stage, or is rejected with its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from megatron.compat.any_model import initialize
from megatron.compat.any_model.gradient_hooks import GradientHooks
from megatron.errors import ConfigError
from tests.helpers.any_model import largest_difference
from tests.helpers.distributed import run_ranks

STAGES = (0, 1, 2, 3)
Change = Callable[[Any], Any]


class Adapter(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.ones(6, 1))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.factors


def removed_hook(model: Any) -> None:
    model[0].weight.register_hook(torch.zeros_like).remove()


def two_hooks(model: Any) -> None:
    model[0].weight.register_hook(torch.sign)
    model[0].weight.register_hook(lambda grad: grad * 2)


AFTER = "a hook on the accumulated gradient"


def halved_in_place(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def adapted(model: Any) -> None:
    model[2] = Adapter(model[2]).double()


CHANGES: dict[str, Change] = {
    AFTER: lambda model: model[0].weight.register_post_accumulate_grad_hook(halved_in_place),
    "a mask": lambda model: model[0].weight.register_hook(lambda grad: grad * torch.arange(6)),
    "a sign": lambda model: model[2].weight.register_hook(torch.sign),
    "no gradient": lambda model: model[3].bias.register_hook(torch.zeros_like),
    "a hook that only looks": lambda model: model[3].bias.register_hook(lambda grad: None),
    "two hooks": two_hooks,
    "a hook that was removed": removed_hook,
    "forward pre-hook": lambda model: model[2].register_forward_pre_hook(lambda _, given: (given[0] * 3,)),
    "backward pre-hook": lambda model: model.register_full_backward_pre_hook(
        lambda _, grads: tuple(grad * 2 for grad in grads)
    ),
    "weight norm": lambda model: parametrizations.weight_norm(model[0]),
    "a parametrization": lambda model: parametrize.register_parametrization(model[2], "weight", Rows().double()),
    "adapter": adapted,
}


def halves(step: int) -> tuple[Tensor, ...]:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64).chunk(2)


def trained(change: Change, rank: int, stage: int | None) -> dict[str, Tensor]:
    """Weights after training; `stage` None is a plain loop."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6)).double()
    change(model)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    if stage is None:
        for step in range(2):
            x = torch.cat(halves(step))
            optimizer.zero_grad()
            F.mse_loss(model(x), x.flip(-1)).backward()
            optimizer.step()
        return dict(model.state_dict())
    config: dict[str, Any] = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
    config["zero_optimization"] = {"stage": stage}
    engine, *_ = initialize(model=model, optimizer=optimizer, config=config)
    for step in range(2):
        for x in halves(step)[rank].chunk(2):
            engine.backward(F.mse_loss(engine(x), x.flip(-1)))
            engine.step()
    return dict(engine.whole_state_dict())


def each_change(rank: int, names: tuple[str, ...]) -> list[str]:
    """Lists differences from the plain loop."""
    wrong = []
    for name in names:
        wanted = trained(CHANGES[name], rank, None)
        for stage in (0, 1) if name == AFTER else STAGES:
            difference = largest_difference(trained(CHANGES[name], rank, stage), wanted)
            if difference > 1e-12:
                wrong.append(f"{name}, stage {stage}: {difference}")
    return wrong


def test_hooks_and_parametrizations() -> None:
    assert run_ranks(2, each_change, tuple(CHANGES)) == [[], []]


def test_planted_bug_hooks_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GradientHooks, "call", lambda *_: None)
    found = run_ranks(2, each_change, ("a mask", "a sign", "no gradient", "a hook that was removed"))
    assert [len(wrong) for wrong in found] == [3 * len(STAGES)] * 2


def refusals(rank: int) -> list[str]:
    said = []

    def refused(change: Change, rank: int, stage: int) -> None:
        with pytest.raises(ConfigError) as error:
            trained(change, rank, stage)
        said.append(str(error.value))

    refused(lambda model: model[0].weight.register_post_accumulate_grad_hook(halved_in_place), rank, 2)
    refused(lambda model: rank or model[0].weight.register_hook(torch.sign), rank, 0)
    refused(lambda model: model[0].weight.register_hook(torch.sum), rank, 1)
    model: Any = nn.Sequential(nn.Linear(6, 6)).double()
    config: dict[str, Any] = {"train_batch_size": 4, "zero_optimization": {"stage": 3}}
    engine, *_ = initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)
    model[0].bias.register_hook(torch.sign)
    engine.backward(engine(halves(0)[0]).mean())
    with pytest.raises(ConfigError) as error:
        engine.step()
    return [*said, str(error.value)]


def test_hooks_that_are_refused() -> None:
    for after, one_rank, shape, late in run_ranks(2, refusals):
        assert after.startswith(
            "zero_optimization.stage 2: 0.weight has a hook of register_post_accumulate_grad_hook()"
        )
        assert "the gradient hooks of 0.weight differ between ranks" in one_rank
        assert "the gradient hook of 0.weight returned () for a gradient of shape (6, 6)" in shape
        assert late.startswith("0.bias has a gradient hook (register_hook()), which would not be called")


def test_a_hook_sees_gradients_without_the_loss_scale() -> None:
    seen: list[Tensor] = []
    torch.manual_seed(0)
    model = nn.Linear(6, 6)
    model.weight.register_hook(lambda grad: seen.append(grad.clone()))
    config = {"train_batch_size": 1, "fp16": {"enabled": True, "loss_scale": 1024.0}}
    engine, *_ = initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)
    engine.backward(engine(torch.ones(1, 6)).float().sum())
    engine.step()
    assert torch.equal(seen[0], torch.ones(6, 6))
