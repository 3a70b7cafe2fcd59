"""A resumed engine equals one that did not stop: bit-equal weights, on the same and on other numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.checkpoint import manifest
from megatron.checkpoint.reader import StepReader
from megatron.compat.any_model import ModelEngine, initialize
from tests.helpers.any_model import batch_of, make_model
from tests.helpers.distributed import run_ranks
from tests.helpers.step_tensors import model_tensors

SAMPLES = 4


def make_engine(ranks: int, *, fp16: bool = False, accumulation: int = 1, stage: int = 0) -> ModelEngine:
    model = make_model(torch.float32, norm=True, no_scalar=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config: dict[str, Any] = {
        "train_batch_size": SAMPLES,
        "gradient_accumulation_steps": accumulation,
        "fp16": {"enabled": fp16, "initial_scale_power": 16},
        "zero_optimization": {"stage": stage},
    }
    if not fp16:
        model.double()
        del config["fp16"]
    made = initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3, 5]),
        config=config,
    )
    return made[0]


def train(engine: ModelEngine, first: int, last: int) -> None:
    """Trains with dropout, whose random numbers belong to the state."""
    rank, micro = engine.global_rank, engine.train_micro_batch_size_per_gpu()
    for step in range(first, last):
        images, labels = batch_of(step, SAMPLES, torch.float64)
        parts = list(zip(images.split(micro), labels.split(micro), strict=True))
        mine = parts[rank * engine.gradient_accumulation_steps() : (rank + 1) * engine.gradient_accumulation_steps()]
        for image, label in mine:
            engine.backward(F.cross_entropy(engine(F.dropout(image, 0.2)), label))
            engine.step()


def trained(rank: int, ranks: int, folder: str, settings: dict[str, Any]) -> list[Any]:
    torch.manual_seed(rank)
    whole = make_engine(ranks, **settings)
    train(whole, 0, 6)
    torch.manual_seed(rank)
    first = make_engine(ranks, **settings)
    train(first, 0, 3)
    first.save_checkpoint(folder, client_state={"epoch": 7, "seen": {1: (2, 3)}, "table": torch.arange(3)})
    torch.manual_seed(99)
    second = make_engine(ranks, **settings)
    path, client_state = second.load_checkpoint(folder)
    assert Path(path).parent.name == "global_step3"
    assert client_state["epoch"] == 7 and client_state["seen"] == {1: (2, 3)}
    assert client_state["table"].tolist() == [0, 1, 2]
    assert second.get_lr() == first.get_lr() and second.global_steps == 3
    train(second, 3, 6)
    assert second.get_lr() == whole.get_lr() != first.get_lr()
    return [whole.whole_state_dict(), second.whole_state_dict(), whole.get_global_grad_norm()]


SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "accumulated": (2, {"accumulation": 2}),
    "fp16": (2, {"fp16": True}),
    "fp16 alone": (1, {"fp16": True}),
    "stage 1": (2, {"fp16": True, "stage": 1}),
    "stage 3": (2, {"fp16": True, "stage": 3}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_resume_is_bit_equal(name: str, tmp_path: Path) -> None:
    ranks, settings = SETTINGS[name]
    for whole, resumed, norm in run_ranks(ranks, trained, ranks, str(tmp_path), settings):
        assert norm > 0
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def saved_state(rank: int, ranks: int, folder: str, settings: dict[str, Any]) -> bool:
    engine = make_engine(ranks, **settings)
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    return True


def loaded_state(rank: int, ranks: int, folder: str, again: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    engine = make_engine(ranks, **settings)
    engine.load_checkpoint(folder)
    engine.save_checkpoint(again)
    return engine.whole_state_dict()


def state_in(folder: Path) -> dict[str, Any]:
    step = next(folder.glob("*/iter_*"))
    reader = StepReader(step, manifest.read(step))
    record = reader.manifest
    state = {
        name: {kind: reader.logical(name, one) for kind, one in kinds.items()}
        for name, kinds in record.optimizer.items()
    }
    return {"model": model_tensors(reader), "optimizer": state, "extra": reader.main_file()["optimizer"]["extra"]}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


LAYOUTS = [
    ((2, 0), (1, 0)),
    ((1, 0), (2, 0)),
    ((2, 1), (2, 0)),
    ((2, 0), (2, 1)),
    ((2, 1), (4, 1)),
    ((2, 3), (2, 1)),
    ((2, 0), (2, 2)),
    ((2, 2), (1, 0)),
]


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize(("saving", "loading"), LAYOUTS)
def test_other_ranks_and_stages_take_it_up_bit_equal(
    saving: tuple[int, int], loading: tuple[int, int], fp16: bool, tmp_path: Path
) -> None:
    """(ranks, stage)"""
    first, again = tmp_path / "first", tmp_path / "again"
    run_ranks(saving[0], saved_state, saving[0], str(first), {"stage": saving[1], "fp16": fp16})
    run_ranks(loading[0], loaded_state, loading[0], str(first), str(again), {"stage": loading[1], "fp16": fp16})
    assert same(state_in(first), state_in(again))
