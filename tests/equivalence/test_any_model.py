"""The engine for any model in fp64 against a plain torch loop over the whole batch, and against torch's own DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.compat.any_model import ModelEngine, initialize
from megatron.compat.any_model.kept_gradients import KeptGradients
from megatron.optimizer import Optimizer
from tests.helpers.any_model import Tiny, batch_of, largest_difference, make_model, plain_loop, weights_of
from tests.helpers.distributed import run_ranks

STEPS, MICRO, GATE = 20, 2, 1e-10


def two_groups(model: Tiny, lr: float = 1e-2) -> list[dict[str, Any]]:
    """The head has its own rate; only the rest has weight decay."""
    head = [model.out.weight, model.out.bias]
    rest = [one for one in model.parameters() if all(one is not other for other in head)]
    return [{"params": rest, "weight_decay": 0.1}, {"params": head, "lr": lr / 10, "weight_decay": 0.0}]


OPTIMIZERS: dict[str, Callable[[Tiny], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "adamw in groups": lambda model: torch.optim.AdamW(two_groups(model), lr=1e-2),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3),
}


def config(ranks: int, accumulation: int, stage: int = 0, **more: Any) -> dict[str, Any]:
    sizes = {"train_batch_size": ranks * accumulation * MICRO, "train_micro_batch_size_per_gpu": MICRO}
    return {**sizes, "zero_optimization": {"stage": stage}, **more}


def train(engine: ModelEngine, steps: int, first: int = 0) -> None:
    """Trains each rank's part of the batch that the plain loop takes whole."""
    rank, accumulation = engine.global_rank, engine.gradient_accumulation_steps()
    for step in range(first, first + steps):
        images, labels = batch_of(step, engine.train_batch_size())
        mine = slice(rank * accumulation * MICRO, (rank + 1) * accumulation * MICRO)
        for image, label in zip(images[mine].split(MICRO), labels[mine].split(MICRO), strict=True):
            engine.backward(F.cross_entropy(engine(image), label))
            engine.step()


def engine_weights(rank: int, ranks: int, kind: str, accumulation: int, stage: int, clip: float) -> dict[str, Tensor]:
    model = make_model(no_scalar=stage > 1)
    engine, *_ = initialize(
        model=model,
        optimizer=OPTIMIZERS[kind](model),
        config=config(ranks, accumulation, stage, gradient_clipping=clip),
    )
    train(engine, STEPS)
    return engine.whole_state_dict()


CASES = [
    (1, "adamw", 4, 0, 0.0),
    (2, "adamw", 1, 0, 0.0),
    (2, "adamw", 4, 0, 0.1),
    (2, "adamw in groups", 2, 0, 0.0),
    (2, "sgd", 1, 0, 0.0),
    (2, "rmsprop", 1, 0, 0.0),
    (4, "adamw in groups", 2, 0, 0.1),
    (2, "adamw", 4, 1, 0.1),
    (2, "rmsprop", 1, 1, 0.0),
    (4, "adamw in groups", 2, 1, 0.1),
    (2, "adamw", 4, 2, 0.1),
    (2, "sgd", 2, 3, 0.0),
    (4, "adamw in groups", 2, 3, 0.1),
]


@pytest.mark.parametrize(("ranks", "kind", "accumulation", "stage", "clip"), CASES)
def test_equals_a_plain_torch_loop(ranks: int, kind: str, accumulation: int, stage: int, clip: float) -> None:
    wanted = plain_loop(OPTIMIZERS[kind], STEPS, ranks * accumulation * MICRO, clip, no_scalar=stage > 1)
    results = run_ranks(ranks, engine_weights, ranks, kind, accumulation, stage, clip)
    for found in results:
        assert largest_difference(found, wanted) < GATE
        assert all(torch.equal(found[name], results[0][name]) for name in found), "the ranks differ"


def plant_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: gradients are summed over the ranks instead of averaged."""
    step = Optimizer.client_step
    monkeypatch.setattr(Optimizer, "client_step", lambda self, grad_scale: step(self, self.loss_scale))


def plant_undivided_accumulation(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = ModelEngine.backward
    monkeypatch.setattr(
        ModelEngine, "backward", lambda self, loss: backward(self, loss * self.gradient_accumulation_steps())
    )


def plant_decayed_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeptGradients, "lacking", property(lambda self: []))


@pytest.mark.parametrize("plant", [plant_summed, plant_undivided_accumulation, plant_decayed_unused])
def test_planted_bugs_are_seen(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = plain_loop(OPTIMIZERS["sgd"] if plant is not plant_decayed_unused else OPTIMIZERS["adamw"], STEPS, 8)
    plant(monkeypatch)
    kind = "adamw" if plant is plant_decayed_unused else "sgd"
    found = run_ranks(2, engine_weights, 2, kind, 2, 0, 0.0)[0]
    assert largest_difference(found, wanted) > 1e-5


def beside_torch_ddp(rank: int) -> float:
    """Includes BatchNorm: each rank's own statistics, and the first rank's buffers."""
    ours, theirs = make_model(norm=True), make_model(norm=True)
    engine, *_ = initialize(model=ours, optimizer=OPTIMIZERS["adamw"](ours), config=config(2, 1))
    wrapped = nn.parallel.DistributedDataParallel(theirs, find_unused_parameters=True)
    optimizer = OPTIMIZERS["adamw"](theirs)
    for step in range(5):
        images, labels = (part.chunk(2)[rank] for part in batch_of(step, 2 * MICRO))
        engine.backward(F.cross_entropy(engine(images), labels))
        engine.step()
        optimizer.zero_grad()
        F.cross_entropy(wrapped(images), labels).backward()
        optimizer.step()
    found, wanted = weights_of(ours), weights_of(theirs)
    if rank > 0:  # torch gives the other ranks the first one's buffers in the next forward pass
        found, wanted = ({name: one for name, one in every.items() if "norm" not in name} for every in (found, wanted))
    return largest_difference(found, wanted)


def test_equals_torch_ddp() -> None:
    assert max(run_ranks(2, beside_torch_ddp)) < GATE
