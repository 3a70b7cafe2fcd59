"""Calls the engine's methods in random orders. After each call the whole state dict and the checkpoint equal those of a
plain model after the same calls."""

from __future__ import annotations

import copy
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.compat.any_model import initialize
from megatron.compat.any_model.gathered_writes import GatheredWrites
from megatron.errors import ConfigError
from tests.helpers.any_model import largest_difference
from tests.helpers.distributed import RankFailed, run_ranks

STAGES = (0, 1, 2, 3)
FREEZES = ("norm.bias", "layers.0.bias")


class Kinds(nn.Module):
    """A list of layers, weights outside it, a tied pair and a frozen layer; buffers written in place and replaced."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.head.weight = self.embed.weight
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.norm, self.fixed = nn.LayerNorm(6), nn.Linear(6, 6).requires_grad_(False)
        self.register_buffer("passes", torch.zeros(3))
        self.register_buffer("replaced", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.replaced = self.replaced + 1
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(self.norm(hidden)) + self.fixed(x)


def halves(step: int) -> tuple[Tensor, ...]:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64).chunk(2)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), x.flip(-1))


class Twins:
    """An engine on this rank, and a plain model that sees the batches of both ranks."""

    def __init__(self, rank: int, stage: int, draw: random.Random, folder: Path) -> None:
        self.rank, self.draw, self.folder = rank, draw, folder
        self.plain = Kinds().double()
        self.updates = torch.optim.AdamW(self.plain.parameters(), lr=0.05)
        model = Kinds().double()
        config: dict[str, Any] = {"train_batch_size": 4, "zero_optimization": {"stage": stage}}
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        self.engine, *_ = initialize(model=model, optimizer=optimizer, config=config)
        self.steps = 0
        self.saved: list[tuple[dict[str, Tensor], dict[str, Any]]] = []

    def train(self) -> None:
        self.steps += 1
        batch = halves(self.steps)
        self.updates.zero_grad()
        loss_of(self.plain, torch.cat(batch)).backward()
        self.engine.backward(loss_of(self.engine, batch[self.rank]))
        self.draw.choice([self.whole, self.evaluate, lambda: None])()  # between a backward pass and its step
        self.updates.step()
        self.engine.step()

    def evaluate(self) -> None:
        x = halves(99)[0]
        self.engine.eval()
        with torch.no_grad():
            assert abs(float(loss_of(self.engine, x) - loss_of(self.plain, x))) < 1e-12
        self.engine.train()

    def forward(self) -> None:
        x = halves(98)[0]
        assert abs(float(loss_of(self.engine, x) - loss_of(self.plain, x))) < 1e-12

    def whole(self) -> None:
        found = self.engine.whole_state_dict()
        assert not any(hasattr(one, "device_mesh") for one in found.values())
        assert largest_difference(found, self.plain.state_dict()) < 1e-10

    def take_other_weights(self) -> None:
        draw = torch.Generator().manual_seed(self.draw.randrange(1000))
        other = {name: torch.randn(one.shape, generator=draw).to(one) for name, one in self.plain.state_dict().items()}
        other["head.weight"] = other["embed.weight"]
        self.plain.load_state_dict(other)
        self.engine.module.load_state_dict(other)

    def freeze(self) -> None:
        """Freezes a parameter, or unfreezes it."""
        name = self.draw.choice(FREEZES)
        trained = not self.plain.get_parameter(name).requires_grad
        for model in (self.plain, self.engine.module):
            model.get_parameter(name).requires_grad_(trained)

    def save(self) -> None:
        self.engine.save_checkpoint(self.folder, tag=str(len(self.saved)))
        self.saved.append((copy.deepcopy(self.plain.state_dict()), copy.deepcopy(self.updates.state_dict())))

    def load(self) -> None:
        if not self.saved:
            return
        tag = self.draw.randrange(len(self.saved))
        weights, state = self.saved[tag]
        how = self.draw.choice([{}, {"load_module_only": True}, {"load_optimizer_states": False}])
        self.engine.load_checkpoint(self.folder, tag=str(tag), **how)
        self.plain.load_state_dict(weights)
        if not how:
            self.updates.load_state_dict(state)


CALLS = ("train", "train", "evaluate", "forward", "whole", "take_other_weights", "freeze", "save", "load")
ORDERS = (
    ("whole", "evaluate", "whole", "evaluate", "save", "take_other_weights", "load"),
    ("save", "train", "load", "train", "forward", "whole", "train"),
    ("train", "evaluate", "freeze", "evaluate", "train", "train"),
)


def drawn(seed: int) -> tuple[str, ...]:
    return tuple(random.Random(seed).choices(CALLS, k=10))


def each_order(rank: int, orders: tuple[tuple[str, ...], ...], folder: str) -> list[str]:
    """Lists errors."""
    wrong = []
    for number, order in enumerate(orders):
        for stage in STAGES:
            twins = Twins(rank, stage, random.Random(number), Path(folder) / f"{number}_{stage}")
            try:
                for call in (*order, "whole"):
                    getattr(twins, call)()
            except (AssertionError, ConfigError, RuntimeError) as error:
                wrong.append(f"stage {stage}, {' '.join(order)}: {error}")
                if not isinstance(error, AssertionError):
                    raise
    return wrong


def test_every_order_of_calls(tmp_path: Path) -> None:
    orders = (*ORDERS, *map(drawn, range(2)))
    assert run_ranks(2, each_order, orders, str(tmp_path)) == [[], []]


def test_planted_bug_freezing_a_gathered_weight_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GatheredWrites, "follow_freezing", lambda *_: None)
    with pytest.raises((AssertionError, RankFailed)):
        assert run_ranks(2, each_order, ORDERS[-1:], str(tmp_path)) == [[], []]


def written_after_evaluation(rank: int, folder: str) -> list[str]:
    said = []
    for stage in (2, 3):
        twins = Twins(rank, stage, random.Random(0), Path(folder))
        twins.evaluate()
        with torch.no_grad():
            twins.engine.module.get_parameter("norm.bias").add_(1)
        for call in (twins.engine.whole_state_dict, partial(twins.engine.save_checkpoint, folder)):
            with pytest.raises(ConfigError) as refused:
                call()
            said.append(str(refused.value))
    return said


def test_a_write_that_would_be_lost_is_not_left_out_of_what_is_saved(tmp_path: Path) -> None:
    for said in run_ranks(2, written_after_evaluation, str(tmp_path)):
        assert all(line.startswith("norm.bias was written between a forward pass and") for line in said), said
