"""tools/verify_checkpoint.py: shapes against the model, a summary, half-written directories, two steps compared."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import classic, manifest, storage
from megatron.checkpoint.besides_tensors import encode_values, values_file, values_of_file
from megatron.checkpoint.manifest import Manifest, Slice, TensorRecord
from megatron.cli.verify_checkpoint import main as verify
from megatron.torch_files.writer import write_torch_file
from tests.helpers import torch_dist
from tests.helpers.megatron_lm import Layout, with_moments, write
from tests.unit.interop.megatron_lm.test_step import GPT2, LLAMA, make
from tests.unit.interop.megatron_lm.test_write import convert


@pytest.fixture
def native(tmp_path: Path) -> Path:
    write(tmp_path / "theirs", with_moments(make(GPT2)), Layout(tp=2, optimizer="fp32"))
    convert(tmp_path / "theirs", tmp_path / "native", "native", "--true-vocab-size", "300")
    return tmp_path / "native/iter_0000500"


def resign(step: Path, change: Callable[[dict[str, Any], Manifest], Manifest]) -> None:
    """Changes the file and its manifest consistently: sizes, checksums, shapes and starts agree."""
    name, record = "mp_rank_00/model_optim_rng.pt", manifest.read(step)
    content = torch.load(step / name, weights_only=True)
    record = change(content, record)
    with open(step / name, "wb") as file:
        starts = write_torch_file(content, file)
    values = values_file(name)
    (step / values).write_bytes(encode_values(values_of_file(content)))

    def placed(records: Mapping[str, TensorRecord]) -> dict[str, TensorRecord]:
        return {
            name: dataclasses.replace(record, slices=(start(record.slices[0]),)) for name, record in records.items()
        }

    def start(piece: Slice) -> Slice:
        found = classic.lookup(content, piece.key)
        return piece if found is None else dataclasses.replace(piece, start=starts[id(found)])

    files = {**record.files, **{each: storage.hash_file(step / each) for each in (name, values)}}
    optimizer = {name: placed(kinds) for name, kinds in record.optimizer.items()}
    record = dataclasses.replace(record, files=files, model=placed(record.model), optimizer=optimizer)
    (step / "manifest.json").write_bytes(manifest.encode(record))


def reshaped(name: str, shape: tuple[int, ...], kind: str = "") -> Callable[[dict[str, Any], Manifest], Manifest]:
    def change(content: dict[str, Any], record: Manifest) -> Manifest:
        held = record.optimizer[name] if kind else record.model
        each = held[kind or name]
        piece = each.slices[0]
        branch = content
        for part in piece.key[:-1]:
            branch = branch[part]
        branch[piece.key[-1]] = torch.zeros(shape)
        whole = dataclasses.replace(
            each, logical_shape=shape, slices=(dataclasses.replace(piece, shape=shape),), dim=0, fold=1
        )
        if kind:
            return dataclasses.replace(record, optimizer={**record.optimizer, name: {**held, kind: whole}})
        return dataclasses.replace(record, model={**record.model, name: whole})

    return change


@pytest.mark.parametrize(
    "name, shape, kind, told",
    [
        (
            "layers.1.mlp.dense_h_to_4h.weight",
            (96, 12),
            "",
            r"has shape (96, 12), but its settings give (96, 24)",
        ),
        ("layers.0.input_layernorm.weight", (12,), "", "has shape (12,), but its settings give (24,)"),
        (
            "layers.0.self_attention.dense.weight",
            (24, 12),
            "exp_avg",
            "(exp_avg) has shape (24, 12), but its parameter",
        ),
    ],
)
def test_a_consistent_manifest_of_other_shapes_is_found(
    native: Path, name: str, shape: tuple[int, ...], kind: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify([str(native)]) == 0
    resign(native, reshaped(name, shape, kind))
    assert verify([str(native)]) == 1
    assert told in capsys.readouterr().out
    assert verify([str(native), "--deep"]) == 1


def test_a_tensor_that_is_missing_or_unknown_is_named(native: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def rename(content: dict[str, Any], record: Manifest) -> Manifest:
        model = dict(record.model)
        model["layers.0.other.weight"] = model.pop("layers.0.input_layernorm.bias")
        return dataclasses.replace(record, model=model)

    resign(native, rename)
    assert verify([str(native), "--deep"]) == 1
    told = capsys.readouterr().out
    assert "also has layers.0.input_layernorm.bias" in told and "without layers.0.other.weight" in told


def test_a_slice_that_holds_less_than_it_claims_is_found(native: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shrink(content: dict[str, Any], record: Manifest) -> Manifest:
        name = "final_layernorm.bias"
        each = record.model[name]
        content["model"]["language_model"]["encoder"][name] = torch.zeros(25)
        piece = dataclasses.replace(each.slices[0], shape=(25,))
        return dataclasses.replace(record, model={**record.model, name: dataclasses.replace(each, slices=(piece,))})

    resign(native, shrink)
    assert verify([str(native), "--deep"]) == 1
    assert "final_layernorm.bias has a slice of shape (25,), but its indices give (24,)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "key, value, told",
    [
        (("iteration",), 501, "has iteration 501, but the manifest has 500"),
        (("optimizer", "extra"), None, "has no optimizer state"),
        (("opt_param_scheduler",), [1], "has no scheduler state"),
        (("rng_state",), [], "has no rng state"),
    ],
)
def test_plain_values_that_a_load_would_miss_are_found(
    key: tuple[str, ...], value: Any, told: str, native: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(content: dict[str, Any], record: Manifest) -> Manifest:
        content["rng_state"] = [{}]
        branch = content
        for part in key[:-1]:
            branch = branch[part]
        branch[key[-1]] = value
        return dataclasses.replace(record, holds=("optimizer", "scheduler", "rng"))

    resign(native, change)
    assert verify([str(native), "--deep"]) == 1
    assert told in capsys.readouterr().out


def test_the_summary(native: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify([str(native.parent)]) == 0
    told = capsys.readouterr().out
    assert "iter_0000500: good" in told
    assert "model: 4 layers, hidden 24, 4 heads, vocabulary 300: " in told and "parameters in float32" in told
    assert "state: step 500, 2000 samples; optimizer (exp_avg, exp_avg_sq), scheduler" in told
    assert "files: 2, " in told and "saved by one rank" in told


def test_what_is_never_read_is_explained(native: Path, capsys: pytest.CaptureFixture[str]) -> None:
    half = native.parent / ".tmp-iter_0000600.run"
    half.mkdir()
    (native.parent / "bad-iter_0000400").mkdir()
    assert verify([str(native.parent)]) == 0
    told = capsys.readouterr().out
    assert ".tmp-iter_0000600.run: an incomplete save" in told
    assert "bad-iter_0000400: a step that was found damaged" in told
    assert verify([str(half)]) == 4
    assert "an incomplete save" in capsys.readouterr().out


@pytest.mark.parametrize("written", ["classic", "torch_dist"])
def test_megatron_lms_own_are_described(tmp_path: Path, written: str, capsys: pytest.CaptureFixture[str]) -> None:
    if written == "classic":
        write(tmp_path, make(GPT2), Layout(tp=2, pp=2))
    else:
        torch_dist.write(tmp_path, make(GPT2), optimizer="buckets")
    assert verify([str(tmp_path), "--deep"]) == 0
    told = capsys.readouterr().out
    assert "iter_0000500: complete, written by Megatron-LM; all its tensors were read" in told
    assert "4 layers, hidden 24" in told
    assert ("note: " in told) == (written == "torch_dist")


@pytest.mark.parametrize(
    "damage, code, told",
    [
        ("a rank is missing", 4, "incomplete: .* is incomplete: it has 3 of the 4 folders"),
        ("a file is cut", 1, "corrupt: .* is not a checkpoint file of torch"),
        ("a file is a link", 3, "unsafe: .* symbolic link"),
    ],
)
def test_a_damaged_tree_of_megatron_lm_is_described_once(
    tmp_path: Path, damage: str, code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second line may not contradict the reason, such as by calling it a native step without its manifest."""
    write(tmp_path, make(GPT2), Layout(tp=2, pp=2))
    file = tmp_path / "iter_0000500/mp_rank_01_001/model_optim_rng.pt"
    if damage == "a rank is missing":
        shutil.rmtree(file.parent)
    elif damage == "a file is cut":
        file.write_bytes(file.read_bytes()[:5000])
    else:
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    assert verify([str(tmp_path)]) == code
    (line,) = capsys.readouterr().out.splitlines()
    assert re.search(f"^iter_0000500: {told}", line), line


def test_two_steps_compared(tmp_path: Path, native: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compares steps across formats and layouts."""
    assert verify(["--compare", str(native), str(tmp_path / "theirs")]) == 0
    assert "equal: " in capsys.readouterr().out
    convert(native.parent, tmp_path / "back", "megatron", "--target-pipeline-parallel-size=2", "--megatron-names=te")
    assert verify(["--compare", str(native.parent), str(tmp_path / "back")]) == 0
    capsys.readouterr()

    def change(content: dict[str, Any], record: Manifest) -> Manifest:
        content["model"]["language_model"]["encoder"]["layers.2.mlp.dense_4h_to_h.weight"][5, 7] += 1
        content["optimizer"]["state"]["layers.3.mlp.dense_4h_to_h.bias"]["exp_avg"][0] += 1
        return record

    resign(native, change)
    assert verify(["--compare", str(native), str(tmp_path / "theirs")]) == 1
    told = capsys.readouterr().out
    assert told.startswith("layers.2.mlp.dense_4h_to_h.weight differs first at (5, 7): ") and "1 of 2304" in told


def test_other_models_are_told_apart(tmp_path: Path, native: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "llama", make(LLAMA), Layout())
    assert verify(["--compare", str(native), str(tmp_path / "llama")]) == 1
    assert "is in " in capsys.readouterr().out
    assert verify(["--compare", str(native), str(native), str(native)]) == 2


def test_a_name_of_a_file_makes_no_line_of_its_own(native: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "x\niter_0000500: good\n\x1b[2J"
    (native / f"{name}.pt").write_text("")
    (native / name).symlink_to("manifest.json")
    capsys.readouterr()
    assert verify([str(native)]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(line.isprintable() for line in lines)
    assert not [line for line in lines if line.startswith("iter_0000500: good")]
