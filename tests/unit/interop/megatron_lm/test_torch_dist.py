"""`torch_dist` directories of Megatron-LM, written by torch's own writer, give the same model bit for bit. Hostile ones
are rejected in one line and execute nothing."""

from __future__ import annotations

import json
import pickle
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.cli import convert_checkpoint as convert_cli
from megatron.errors import CheckpointError, MegatronError
from megatron.interop.megatron_lm import open_foreign
from tests.helpers.megatron_lm import with_moments
from tests.helpers.step_tensors import model_tensors
from tests.helpers.torch_dist import write
from tests.unit.interop.megatron_lm.test_step import GPT2, LLAMA, MIXTRAL, MOE, check_weights, load, make, params_of


@pytest.mark.parametrize("common", [True, False])
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("settings", [GPT2, LLAMA])
def test_weights(tmp_path: Path, settings: dict[str, Any], stacked: bool, common: bool) -> None:
    model = make(settings)
    write(tmp_path, model, tp=2, stacked=stacked, common=common)
    params = params_of(settings)
    loaded = load(tmp_path, params, finetune=True)
    assert loaded.step == 500
    check_weights(params, model)


@pytest.mark.parametrize("stacked", [True, False])
def test_experts(tmp_path: Path, stacked: bool) -> None:
    model = make(MIXTRAL, MOE)
    write(tmp_path, model, tp=2, stacked=stacked)
    params = params_of(MIXTRAL, MOE)
    load(tmp_path, params, finetune=True)
    check_weights(params, model)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("optimizer", ["model_space", "reshardable", "flat"])
@pytest.mark.parametrize("settings, moe", [(LLAMA, None), (MIXTRAL, MOE)])
def test_the_optimizer(
    tmp_path: Path, settings: dict[str, Any], moe: dict[str, Any] | None, optimizer: str, stacked: bool
) -> None:
    model = with_moments(make(settings, moe, dtype=torch.bfloat16))
    write(tmp_path, model, tp=2, stacked=stacked, optimizer=optimizer)
    params = params_of(settings, moe, dtype=torch.bfloat16)
    loaded = load(tmp_path, params)
    check_weights(params, model)
    assert loaded.optimizer is not None and loaded.optimizer_extra is not None
    assert loaded.iteration == 500 and loaded.optimizer_extra["step"] == 499
    for name, held in loaded.optimizer.items():
        assert set(held) == {"exp_avg", "exp_avg_sq", "master"}
        for kind, tensor in held.items():
            assert torch.equal(tensor, model.moments[name][kind]), (name, kind)


def test_buckets_of_ranks_are_refused_by_name(tmp_path: Path) -> None:
    model = make(GPT2)
    write(tmp_path, model, optimizer="buckets")
    with pytest.raises(CheckpointError, match=r"buckets of the ranks that saved it .*--no-load-optim"):
        load(tmp_path, params_of(GPT2))
    params = params_of(GPT2)
    load(tmp_path, params, load_optim=False)
    check_weights(params, model)


def test_conversion(tmp_path: Path) -> None:
    model = with_moments(make(LLAMA, dtype=torch.bfloat16))
    write(tmp_path / "theirs", model, tp=2, optimizer="flat")
    command = ["--load", str(tmp_path / "theirs"), "--to", "native", "--save", str(tmp_path / "ours")]
    assert convert_cli.main([*command, "--true-vocab-size", "300"]) == 0
    params = params_of(LLAMA, dtype=torch.bfloat16)
    loaded = load(tmp_path / "ours", params, load_rng=False)
    check_weights(params, model)
    assert loaded.optimizer is not None
    assert all(torch.equal(t, model.moments[n][k]) for n, held in loaded.optimizer.items() for k, t in held.items())


@pytest.mark.parametrize(
    "backend, named",
    [*((name, name) for name in ("torch_dcp", "fsdp_dtensor", "zarr")), ("two\nlines", r"'two\\nlines'")],
)
def test_another_distributed_format_is_refused_by_name(tmp_path: Path, backend: str, named: str) -> None:
    folder = write(tmp_path, make(GPT2))
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": backend}))
    with pytest.raises(CheckpointError, match=rf"distributed format {named}, which is not supported"):
        load(tmp_path, params_of(GPT2), finetune=True)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, make(GPT2))
    next(folder.glob("*.distcp")).unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is missing"):
        load(tmp_path, params_of(GPT2), finetune=True)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, make(GPT2))
    file = next(folder.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=r"is too short|cannot be read|is not a checkpoint file"):
        load(tmp_path, params_of(GPT2), finetune=True)


def test_missing_metadata_says_that_it_was_never_completed(tmp_path: Path) -> None:
    folder = write(tmp_path, make(GPT2))
    (folder / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"\.metadata is missing: the checkpoint was never completed"):
        load(tmp_path, params_of(GPT2), finetune=True)


def hostile(text: bytes, count: int, seed: int) -> list[bytes]:
    choose, found = random.Random(seed), []
    for _ in range(count):
        changed = bytearray(text)
        for _ in range(choose.choice((1, 1, 2, 8))):
            place = choose.randrange(len(changed))
            match choose.randrange(4):
                case 0:
                    changed[place] = choose.randrange(256)
                case 1:
                    del changed[place : place + choose.choice((1, 2, 50))]
                case 2:
                    changed[place:place] = bytes(choose.randrange(256) for _ in range(choose.choice((1, 4))))
                case 3:
                    other = choose.randrange(len(changed))
                    changed[place : place + 8] = changed[other : other + 8]
        found.append(bytes(changed))
    return found


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_changed_bytes_are_refused_in_one_line_or_read_the_same(tmp_path: Path, name: str) -> None:
    """Random with a fixed seed. Every outcome is a step or a line, in little time and memory."""
    folder = write(tmp_path, make(GPT2), tp=2)
    whole = (folder / name).read_bytes()
    refused = 0
    for changed in hostile(whole, 60, seed=11):
        (folder / name).write_bytes(changed)
        before = time.monotonic()
        try:
            step = open_foreign(folder)
            assert step is not None
            model_tensors(step.reader)
        except MegatronError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 1000
        assert time.monotonic() - before < 60  # one that takes longer hangs
    assert refused > 30


def test_two_tensors_for_one_state_are_refused(tmp_path: Path) -> None:
    """The reader cannot know which of them is meant."""
    model = with_moments(make(GPT2))
    folder = write(tmp_path, model, optimizer="model_space")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    name = "optimizer.state.exp_avg.decoder.final_layernorm.weight"
    metadata.state_dict_metadata[f"chained_1.{name}"] = metadata.state_dict_metadata[name]
    for index, place in list(metadata.storage_data.items()):
        if index.fqn == name:
            metadata.storage_data[replace(index, fqn=f"chained_1.{name}")] = place
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(
        CheckpointError, match=rf"has the exp_avg of decoder.final_layernorm.weight twice, as {name} and"
    ):
        load(tmp_path, params_of(GPT2))


def test_a_malformed_tensor_among_the_counters_is_refused_by_name(tmp_path: Path) -> None:
    class Negative:
        def __reduce__(self) -> tuple[Any, ...]:
            return torch._utils._rebuild_tensor_v2, (None, 0, (-1,), (1,), False, {})

    one = {"optimizer": {"state": {}, "param_groups": [{"params": [], "step": Negative()}]}}
    folder = write(tmp_path, make(GPT2), state=one)
    with pytest.raises(CheckpointError, match="has a tensor that is not described in the way"):
        open_foreign(folder)
