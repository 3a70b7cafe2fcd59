"""Programs that access weights while ranks shard them (ZeRO 2 and 3): the result is right, or one line says what to
call instead."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.compat.any_model import initialize
from megatron.errors import ConfigError
from tests.helpers.any_model import largest_difference
from tests.helpers.distributed import run_ranks


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layers = nn.Linear(6, 6), nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def encode(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x

    def penalty(self) -> Any:
        return sum(one.square().sum() for one in self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x).sum()


X = torch.ones(2, 6, dtype=torch.float64)


def made(stage: int) -> tuple[Any, Any]:
    model = Encoder().double()
    config: dict[str, Any] = {"train_batch_size": 4, "zero_optimization": {"stage": stage}}
    engine, *_ = initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    return engine, model


def penalised(engine: Any, model: Any) -> None:
    penalty = model.penalty()
    engine.backward(engine(X) + penalty)


def penalised_whole(engine: Any, model: Any) -> None:
    penalty = model.penalty().full_tensor()
    assert float(penalty) > 0  # which may be read
    engine.backward(engine(X) + penalty)


def averaged(engine: Any, model: Any) -> None:
    torch.zeros(6, 6, dtype=torch.float64).add_(model.first.weight.detach(), alpha=0.1)


def saved(engine: Any, model: Any) -> None:
    torch.save(model.state_dict(), io.BytesIO())


DIVIDED = "the ranks divide the model's weights (ZeRO 2 and 3) and gather them only for the passes of engine(x)"
REFUSED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "method": (lambda engine, model: model.encode(X), f"linear: {DIVIDED}"),
    "method of the engine": (lambda engine, model: engine.encode(X), f"linear: {DIVIDED}"),
    "penalty before the pass": (penalised, f"engine.backward(loss): {DIVIDED}"),
    "penalty alone": (lambda engine, model: engine.backward(model.penalty()), f"engine.backward(loss): {DIVIDED}"),
    "whole penalty": (penalised_whole, f"full_tensor: {DIVIDED}"),
    "average": (averaged, f"add_: {DIVIDED}"),
    "numpy": (lambda engine, model: model.first.weight.detach().numpy(), f"numpy: {DIVIDED}"),
    "copy of the model": (lambda engine, model: copy.deepcopy(model), "copy.deepcopy(): the ranks divide"),
    "copy of a layer": (lambda engine, model: copy.deepcopy(model.layers[0]), "copy.deepcopy(): the ranks divide"),
    "copy of the engine": (
        lambda engine, model: copy.deepcopy(engine),
        "copy.deepcopy(engine): an engine cannot be",
    ),
    "saved shards": (saved, "torch.save(): state_dict() holds this rank's part"),
}


def refusals(rank: int) -> list[str]:
    """Lists calls with a wrong error message."""
    wrong = []
    for stage in (2, 3):
        for name, (call, said) in REFUSED.items():
            engine, model = made(stage)
            with pytest.raises(ConfigError) as error:
                call(engine, model)
            if not str(error.value).startswith(said):
                wrong.append(f"stage {stage}, {name}: {error.value}")
    return wrong


def test_what_cannot_be_computed_from_divided_weights_is_one_line() -> None:
    assert run_ranks(2, refusals) == [[], []]


def assigned(model: Any) -> None:
    model.load_state_dict(Encoder().double().state_dict(), assign=True)


def with_another_layer(model: Any) -> None:
    model.layers[1] = nn.Linear(6, 6).double()


def with_another_parameter(model: Any) -> None:
    model.layers[0].weight = nn.Parameter(torch.ones(6, 6, dtype=torch.float64))


REPLACED = {assigned: "first.weight", with_another_layer: "layers.1.weight", with_another_parameter: "layers.0.weight"}


def replacements(rank: int) -> list[str]:
    """Lists replacements that were accepted or had a wrong error message."""
    wrong = []
    for stage in (0, 1, 2, 3):
        for replace, name in REPLACED.items():
            for first in (0, 1):
                engine, model = made(stage)
                for number in range(first + 1):
                    if number == first:
                        replace(model)
                    try:
                        engine.backward(engine(X))
                        engine.step()
                    except ConfigError as error:
                        if number < first or not str(error).startswith(
                            f"{name} was added after megatron.compat.initialize()"
                        ):
                            wrong.append(f"stage {stage}, {replace.__name__}: {error}")
                        break
                else:
                    wrong.append(f"stage {stage}, {replace.__name__} after {first} steps: nothing")
    return wrong


def test_parameters_that_come_later_are_refused() -> None:
    """Parameters that are replaced later would not be trained."""
    assert run_ranks(2, replacements) == [[], []]


def steps(engine: Any, model: Any, optimizer: Any = None) -> None:
    """Calls layers directly as well, even before the first pass of the whole model."""
    for number in range(3):
        loss = model.layers[1](X).square().mean() + (engine or model)(X * number)
        if engine is None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        else:
            engine.backward(loss)
            engine.step()


def taken_back(rank: int) -> list[float]:
    """Differences from a plain loop, and from weights that were saved and loaded back."""
    plain = Encoder().double()
    steps(None, plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    found = []
    for stage in (0, 1, 2, 3):
        engine, model = made(stage)
        steps(engine, model)
        found.append(largest_difference(engine.whole_state_dict(), plain.state_dict()))
        kept = copy.deepcopy(model.state_dict())
        steps(engine, model)
        model.load_state_dict(kept)
        found.append(largest_difference(engine.whole_state_dict(), plain.state_dict()))
    return found


def test_layers_by_themselves_and_shards_that_are_kept() -> None:
    for found in run_ranks(2, taken_back):
        assert max(found) < 1e-12, found


@pytest.mark.parametrize("stage", [0, 1])
def test_a_copy_of_the_model_below_stage_2(stage: int) -> None:
    engine, model = made(stage)
    engine.backward(engine(X))
    engine.step()
    copied = copy.deepcopy(engine.module)
    steps(engine, model)
    assert largest_difference(dict(copied.state_dict()), dict(model.state_dict())) > 0
    copied(X).backward()
    assert copied.first.weight.grad is not None
