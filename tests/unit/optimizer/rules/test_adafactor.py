"""Adafactor beside torch's and transformers' classes; and the place of a piece in its parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.optimization import Adafactor as Transformers

from megatron.config.sections.optimizer import OptimizerConfig
from megatron.data_parallel import BucketStore
from megatron.distributed.parallel_state import Axis
from megatron.optimizer import GroupRule, Matrix
from megatron.optimizer.rules.adafactor import Adafactor, rectangles, rows_and_columns
from megatron.optimizer.rules.choose import choose_rules
from megatron.state.shard import Shard
from tests.helpers.update_rule import update

SINGLE = Axis.single("x")
SHAPES = ((7, 30), (30, 7), (30,), (5, 3, 2))
STEPS = 12
LR, DECAY = 2e-2, 0.1


def start() -> list[Tensor]:
    """Weights of very different sizes, some below the minimum size that Adafactor assumes."""
    made = torch.Generator().manual_seed(0)
    return [10.0**-i * torch.randn(shape, generator=made, dtype=torch.float64) for i, shape in enumerate(SHAPES)]


def gradients(step: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(step + 1)
    return [
        torch.randn(shape, generator=made, dtype=torch.float64) * torch.linspace(0.01, 1 + step, shape[-1]).double()
        for shape in SHAPES
    ]


def ours(decay: float = 0.0, **settings: Any) -> list[Tensor]:
    weights = start()
    parameters = {str(number): torch.nn.Parameter(weight) for number, weight in enumerate(weights)}
    grads = BucketStore(parameters.items(), Axis.single("dp"))
    groups = {
        name: GroupRule(matrix=Matrix(Shard(name, tuple(p.shape)), SINGLE, SINGLE, p.shape[-1]))
        for name, p in parameters.items()
    }
    config = OptimizerConfig(optimizer="adafactor", **settings)
    rules = choose_rules(grads, config, groups, {}, torch.device("cpu"))
    slots = [rules[name].slot(name, weight) for name, weight in zip(parameters, weights, strict=True)]
    for step in range(STEPS):
        update(rules["0"], slots, gradients(step), LR, decay)
    return weights


def theirs(build: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]) -> list[Tensor]:
    parameters = [torch.nn.Parameter(weight) for weight in start()]
    optimizer = build(parameters)
    for step in range(STEPS):
        for parameter, grad in zip(parameters, gradients(step), strict=True):
            parameter.grad = grad
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def apart(some: list[Tensor], others: list[Tensor]) -> float:
    """Largest relative distance of parameters up to two dimensions; for others we keep the whole second moment."""
    pairs = list(zip(some, others, strict=True))[:3]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def as_transformers(**settings: Any) -> Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]:
    return lambda parameters: Transformers(parameters, **{"lr": LR, "relative_step": False, **settings})


TORCH = {"eps": (1e-30, 1e-3)}
BESIDE: dict[str, tuple[dict[str, Any], Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]]] = {
    "torch": (
        {"adafactor_relative_step": True, "decay": DECAY},
        lambda p: torch.optim.Adafactor(p, lr=LR, weight_decay=DECAY, eps=(1e-30, 1e-3)),
    ),
    "torch, a threshold and a rate of decay": (
        {"adafactor_clip_threshold": 1.3, "adafactor_decay_rate": -0.5, "adafactor_eps2": 0.05},
        lambda p: torch.optim.Adafactor(p, lr=LR, d=1.3, beta2_decay=-0.5, eps=(1e-30, 0.05)),
    ),
    "transformers": ({}, as_transformers()),
    "transformers, the rate alone": (
        {"adafactor_scale_parameter": False, "decay": DECAY},
        as_transformers(scale_parameter=False, weight_decay=DECAY),
    ),
    "transformers, a first moment": ({"adafactor_beta1": 0.9}, as_transformers(beta1=0.9)),
    "transformers, a large epsilon": ({"adafactor_eps1": 0.1}, as_transformers(eps=(0.1, 1e-3))),
}


@pytest.mark.parametrize("name", BESIDE)
def test_it_is_that_of(name: str) -> None:
    settings, build = BESIDE[name]
    assert apart(ours(**settings), theirs(build)) < 1e-13


def test_every_option_counts() -> None:
    """Otherwise an option above might agree because it does nothing."""
    assert all(apart(ours(**settings), ours()) > 1e-4 for name, (settings, _) in BESIDE.items() if settings)


def test_the_rate_of_the_paper() -> None:
    """transformers' relative step is at most 0.01, and 1 / sqrt(t) from update 10 000 on."""
    build = as_transformers(lr=None, relative_step=True)
    paper = theirs(build)
    settings = OptimizerConfig(optimizer="adafactor", adafactor_relative_step=True)
    grads = BucketStore([("w", torch.nn.Parameter(start()[0]))], Axis.single("dp"))
    matrix = Matrix(Shard("w", SHAPES[0]), SINGLE, SINGLE, SHAPES[0][1])
    rule = choose_rules(grads, settings, {"w": GroupRule(matrix=matrix)}, {}, torch.device("cpu"))["w"]
    assert isinstance(rule, Adafactor)
    weight = start()[0]
    slot = rule.slot("w", weight)
    for step in range(STEPS):
        update(rule, [slot], [gradients(step)[0]], 0.01, 0.0)
    assert float((weight - paper[0]).norm()) < 1e-13
    for step, rate in ((4.0, 0.01), (40000.0, 0.005)):
        size = torch.ones((), dtype=torch.float64)
        assert math.isclose(float(rule._rate(0.01, torch.tensor(step), size)), rate, rel_tol=1e-6)


@pytest.mark.parametrize(("rows", "columns"), [(1, 5), (5, 1), (4, 3)])
def test_rectangles_are_the_piece(rows: int, columns: int) -> None:
    numbers = torch.arange(rows * columns).view(rows, columns)
    for start, stop in _ranges(rows * columns):
        parts = list(rectangles((start, stop), columns))
        assert len(parts) <= 3
        piece = numbers.view(-1)[start:stop]
        assert all(torch.equal(part.of(piece), numbers[part.rows, part.columns]) for part in parts)
        assert torch.equal(torch.cat([part.of(piece).reshape(-1) for part in parts]) if parts else piece, piece)


def _ranges(count: int) -> Iterator[tuple[int, int]]:
    return ((start, stop) for start in range(count + 1) for stop in range(start, count + 1))


def test_sides_of_a_fused_matrix() -> None:
    """Two of the four query heads beside a replica of their key and value; the hidden side is whole."""
    split = Shard("w", (1, 6, 3, 8), 0, ((0, 2), (4, 6)), ("tp",), 2, ((4, 6),))
    rows, columns = rows_and_columns(split, 18)
    assert (rows.logical_shape, rows.local_shape, rows.copies) == ((1, 6, 3), (4, 3), ((4, 6),))
    assert (columns.logical_shape, columns.ranges) == ((8,), None)
    out = Shard("w", (8, 4, 3), 1, ((2, 4),))
    rows, columns = rows_and_columns(out, 8)
    assert (rows.ranges, columns.logical_shape, columns.held) == (None, (4, 3), ((2, 4),))


def test_planted_bug_the_rate_is_relative_to_the_decayed_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = Adafactor._rate
    monkeypatch.setattr(Adafactor, "_rate", lambda self, lr, step, size: rate(self, lr, step, size * (1 - lr * DECAY)))
    with pytest.raises(AssertionError):
        test_it_is_that_of("torch")
