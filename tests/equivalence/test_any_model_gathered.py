"""Layers that all ranks gather together (ZeRO 2 and 3): errors for ranks that use different layers, and for programs
that write into gathered weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.compat.any_model import initialize
from megatron.compat.any_model.gathered_writes import GatheredWrites
from megatron.compat.any_model.same_use import SameUse
from megatron.errors import ConfigError
from tests.helpers.distributed import RankFailed, run_ranks


class Layers(nn.Module):
    """A first layer of this width beside one of width 6."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        inner = nn.Sequential(nn.Linear(6, width), nn.Linear(width, 6)) if width > 6 else nn.Linear(6, 6)
        self.layers = nn.ModuleList([inner, nn.Linear(6, 6)])

    def forward(self, x: Tensor, which: tuple[int, ...]) -> Tensor:
        for number in which:
            x = self.layers[number](x)
        return x


def other_layers(rank: int, accumulation: int) -> bool:
    """Ranks use different layers of one size in the second step; without a check, their messages would be mixed up."""
    for stage in (2, 3):
        model = Layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = {
            "train_batch_size": 4 * accumulation,
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage},
        }
        engine, *_ = initialize(model=model, optimizer=optimizer, config=config)
        for number in range(accumulation):
            engine.backward(engine(torch.ones(2, 6), (number % 2,)).sum())
            engine.step()
        with pytest.raises(ConfigError, match=r"layers.0.weight: was used by some ranks and not by others"):
            for number in range(accumulation):
                engine.backward(engine(torch.ones(2, 6), ((rank + number) % 2,)).sum())
                engine.step()
    return True


@pytest.mark.parametrize("accumulation", [1, 2])
def test_ranks_that_use_other_layers_at_stages_2_and_3_are_told(accumulation: int) -> None:
    assert run_ranks(2, other_layers, accumulation) == [True, True]


def layers_of_other_sizes(rank: int, width: int) -> bool:
    """One rank uses another layer, or one layer more; without a check, gloo would abort the process."""
    for stage in (2, 3):
        for used in (((0,), (1,)), ((1,), (1, 0))):
            model = Layers(width)
            config: dict[str, Any] = {"train_batch_size": 4, "zero_optimization": {"stage": stage}}
            engine, *_ = initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)
            with pytest.raises(ConfigError, match=r"layers.0\S*: is used by some ranks while others use another layer"):
                engine(torch.ones(2, 6), used[rank])
    return True


def test_ranks_that_use_layers_of_other_sizes_at_stages_2_and_3_are_told() -> None:
    assert run_ranks(2, layers_of_other_sizes, 9) == [True, True]


def test_planted_bug_gathers_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses layers of one size, where gloo does not notice."""
    monkeypatch.setattr(SameUse, "_compare", lambda *_: None)
    with pytest.raises(RankFailed, match="DID NOT RAISE"):
        run_ranks(2, layers_of_other_sizes, 6)


def written_while_gathered(rank: int) -> list[str]:
    """Tests writes between steps, which must be kept, and within a step; returns the error of the latter."""
    said = []
    for stage in (2, 3):
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        config: dict[str, Any] = {"train_batch_size": 4, "zero_optimization": {"stage": stage}}
        engine, *_ = initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)
        whole = nn.Sequential(*(nn.Linear(6, 6) for _ in range(2)))
        whole.load_state_dict({name.removeprefix("module."): one for name, one in engine.whole_state_dict().items()})
        other = torch.optim.SGD(whole.parameters(), 0.1)
        for _ in range(3):
            with torch.no_grad():  # between two steps it counts
                for one in (model[0].bias, whole[0].bias):
                    one.add_(1.0)
            other.zero_grad()
            whole(torch.ones(2, 6)).sum().backward()
            other.step()
            engine.backward(engine(torch.ones(2, 6)).sum())
            engine.step()
        found = engine.whole_state_dict()
        said.append(str(max(float((found[name] - one).abs().max()) for name, one in whole.state_dict().items()) < 1e-5))
        engine.backward(engine(torch.ones(2, 6)).sum())
        with torch.no_grad():
            model[0].bias.add_(1.0)
        try:
            engine.step()
            said.append("nothing")
        except ConfigError as error:
            said.append(str(error))
    return said


def test_weights_that_are_written_while_they_are_gathered() -> None:
    """Stage 3 keeps nothing gathered after a backward pass."""
    for kept, refused, kept_too, taken in run_ranks(2, written_while_gathered):
        assert (kept, kept_too) == ("True", "True")
        assert refused.startswith("0.bias was written between a forward pass and engine.step()")
        assert taken == "nothing"


def test_planted_bug_writes_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GatheredWrites, "found", lambda self: [])
    with pytest.raises(AssertionError):
        test_weights_that_are_written_while_they_are_gathered()


def list_alone(rank: int) -> list[str]:
    said = []
    for stage in (2, 3):
        for model in (nn.ModuleList([nn.Linear(6, 6)]), nn.ModuleDict({"one": nn.Linear(6, 6)})):
            config: dict[str, Any] = {"train_batch_size": 4, "zero_optimization": {"stage": stage}}
            with pytest.raises(ConfigError) as refused:
                initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)
            said.append(str(refused.value))
    dicts = Dicts()
    config = {"train_batch_size": 4, "zero_optimization": {"stage": 3}}
    engine, *_ = initialize(model=dicts, optimizer=torch.optim.SGD(dicts.parameters(), 0.1), config=config)
    engine.backward(engine(torch.ones(2, 6)).sum())
    engine.step()
    return said


class Dicts(nn.Module):
    """A list of dicts of layers, without a forward pass at any level."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"one": nn.Linear(6, 6)}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer["one"](x)  # type: ignore[index]
        return x


def test_a_list_of_layers_without_a_forward_pass() -> None:
    """A list is rejected as the model; inside a model, its layers are gathered."""
    for said in run_ranks(2, list_alone):
        for kind, line in zip(["ModuleList", "ModuleDict"] * 2, said, strict=True):
            assert f"the model is a {kind} without its own forward()" in line


def test_planted_bug_uses_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SameUse, "_came", lambda *_: None)
    with pytest.raises(RankFailed, match="DID NOT RAISE"):
        test_ranks_that_use_other_layers_at_stages_2_and_3_are_told(1)
