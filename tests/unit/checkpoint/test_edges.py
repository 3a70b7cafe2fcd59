"""Whatever can be saved can be loaded and verified, at the edges of types and sizes; a foreign file gives one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from megatron.checkpoint import manifest
from megatron.checkpoint.content import NonFiniteError
from megatron.checkpoint.found_step import find_checkpoint
from megatron.checkpoint.load import load_checkpoint
from megatron.checkpoint.reader import StepReader
from megatron.checkpoint.run_state import RunHistory
from megatron.checkpoint.verify import inspect_step
from megatron.compat.any_model.plain import mark_types, restore_types
from megatron.config import OptimizerConfig, PrecisionConfig
from megatron.data_parallel import BucketStore
from megatron.distributed.parallel_state import Axis
from megatron.errors import CheckpointError, ConfigError, StorageError
from megatron.optimizer import Optimizer
from megatron.state.shard import Shard
from megatron.utils.typed import typed
from tests.unit.checkpoint.support import make_params, make_state, one_process, save

STEP = "iter_0000010"
TENSORS: dict[str, Callable[[], Tensor]] = {
    "complex32": lambda: torch.complex(torch.ones(3), torch.arange(3.0)).to(torch.complex32),
    "float8_e4m3fn": lambda: torch.arange(4.0).to(torch.float8_e4m3fn),
    "float8_e5m2": lambda: torch.arange(4.0).to(torch.float8_e5m2),
    "no float8": lambda: torch.empty(0).to(torch.float8_e4m3fn),
    "one complex number": lambda: torch.tensor(1 + 2j),
    "uint64": lambda: torch.tensor([2**64 - 1], dtype=torch.uint64),
}


def of_one(tensor: Tensor, **more: Any) -> Any:
    given = {"params": {"x": (Shard("x", tuple(tensor.shape)), tensor)}, "optimizer": None, "config": {}, "args": {}}
    return make_state(**given, **more)


@pytest.mark.parametrize("name", TENSORS)
def test_every_type_that_is_saved_is_read_and_verified(name: str, tmp_path: Path) -> None:
    tensor = TENSORS[name]()
    save(tmp_path, of_one(tensor))
    _, problems = inspect_step(tmp_path / STEP, deep=True)
    assert problems == []
    reader = StepReader(tmp_path / STEP, manifest.read(tmp_path / STEP))
    found = reader.logical("x", reader.manifest.model["x"])
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(torch.view_as_real(found) if found.is_complex() else found.float(), _real(tensor))


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor.float()


def test_a_complex_nan_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="x holds NaN"):
        save(tmp_path, of_one(torch.tensor([1j, complex(float("nan"), 0)])))


def test_a_generators_state_comes_back(tmp_path: Path) -> None:
    """PCG64 has 128-bit integers."""
    given = {"generator": numpy.random.default_rng(3).bit_generator.state, "large": 2**64 - 1, "negative": -(2**127)}
    state = replace(make_state(), extra=mark_types(given, "client_state"))
    save(tmp_path, state)
    _, problems = inspect_step(tmp_path / STEP, deep=True)
    found = find_checkpoint(tmp_path, parallel=one_process(), log=lambda text: None)
    assert problems == [] and found is not None
    loaded = load_checkpoint(found, params=make_params(1), parallel=one_process(), history=RunHistory("again"))
    assert restore_types(loaded.extra) == given


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (2**2100, "integer of 2101 bits"),
        (None, "is nested more than 80 deep"),
        ([2**64] * 901, "has 901 integers of over"),
    ],
)
def test_what_could_not_be_read_is_not_saved(value: Any, words: str) -> None:
    for _ in range(120 if value is None else 0):
        value = [value]
    with pytest.raises(ConfigError, match=f"client_state.*{words}"):
        mark_types({"x": value}, "client_state")


def test_a_frozen_parameter_has_no_state_here() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    store = BucketStore(model.named_parameters(), Axis.single("dp"), flat=True)
    optimizer = Optimizer(store, OptimizerConfig(), PrecisionConfig())
    assert optimizer.held("0.weight") is None and "0.weight" not in optimizer.state()
    with pytest.raises(CheckpointError, match=r"not in this model: 0\.weight.*--no-load-optim"):
        optimizer.load_state({**optimizer.state(), "0.weight": {}}, optimizer.extra_state())


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "indices twice": lambda body: (
        body["model"]["x"].update(logical_shape=[4, 4]),
        body["model"]["x"]["slices"][0].update(ranges=[[0, 4], [0, 4]]),
    ),
    "a name of 300 characters": lambda body: body["files"].update({"a" * 300: {"size": 1, "blocks": ["0"]}}),
    "a path of 6,000": lambda body: body["files"].update({"a/" * 3000 + "b": {"size": 1, "blocks": ["0"]}}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_strangers_manifest_is_one_line(name: str, tmp_path: Path) -> None:
    save(tmp_path, of_one(torch.arange(32.0).view(8, 4)))
    file = tmp_path / STEP / "manifest.json"
    body = json.loads(file.read_bytes())["manifest"]
    CHANGES[name](body)
    file.write_bytes(manifest.encode(typed(manifest.Manifest, body)))
    _, problems = inspect_step(tmp_path / STEP)
    assert problems and all("\n" not in problem.text and len(problem.text) < 1000 for problem in problems)
    with pytest.raises(CheckpointError):
        find_checkpoint(tmp_path, parallel=one_process(), log=lambda text: None)


def test_a_file_in_the_place_of_the_save_directory(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    history = RunHistory("test")
    save(folder, make_state(), history)
    folder.rename(tmp_path / "elsewhere")
    folder.write_text("")
    with pytest.raises(StorageError, match="was moved, removed or replaced"):
        save(folder, make_state(iteration=20), history)
    history.close()
