"""Reading weights of a checkpoint that Megatron-LM wrote: without a manifest, with an argparse.Namespace inside."""

from __future__ import annotations

import enum
import sys
import types
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.errors import CheckpointError
from tests.unit.checkpoint.support import PADDED, SHAPES, load, make_params, make_state, save

Written = Callable[[enum.Enum], tuple[Any, ...]]
"""How Python pickles a member of an enumeration."""


def by_value(member: enum.Enum) -> tuple[Any, ...]:
    return type(member), (member.value,)


def by_name(member: enum.Enum) -> tuple[Any, ...]:
    """Python 3.11.0 to 3.11.3."""
    return getattr, (type(member), member.name)


def write_megatron(
    directory: Path, monkeypatch: pytest.MonkeyPatch, written: Written = by_value, **changes: Any
) -> dict[str, torch.Tensor]:
    """As 23.06 writes it: nested names, a Namespace that mentions Megatron's own enumeration."""
    module = types.ModuleType("megatron.core.enums")

    class ModelType(enum.Enum):
        encoder_or_decoder = 1

        def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
            return written(self)

    ModelType.__module__, ModelType.__qualname__ = module.__name__, "ModelType"
    module.ModelType = ModelType  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.core", types.ModuleType("megatron.core"))
    monkeypatch.setitem(sys.modules, "megatron.core.enums", module)
    tensors = {name: torch.randn(stored) for name, (_, stored, _) in SHAPES.items()}
    encoder = {name: t for name, t in tensors.items() if "embedding" not in name}
    embedding = {
        kind: {"weight": tensors[f"embedding.{kind}.weight"]} for kind in ("word_embeddings", "position_embeddings")
    }
    content = {
        "args": Namespace(num_layers=1, model_type=ModelType.encoder_or_decoder),
        "checkpoint_version": 3.0,
        "iteration": 500,
        "model": {"language_model": {"embedding": embedding, "encoder": encoder}},
        **changes,
    }
    folder = directory / "iter_0000500/mp_rank_00"
    folder.mkdir(parents=True)
    torch.save(content, folder / "model_optim_rng.pt")
    (directory / "latest_checkpointed_iteration.txt").write_text("500")
    return tensors


@pytest.mark.parametrize("written", [by_value, by_name])
def test_weights_come_with_finetune_alone(tmp_path: Path, written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = write_megatron(tmp_path, monkeypatch, written)
    params = make_params(seed=4)
    messages: list[str] = []
    loaded = load(tmp_path, params, finetune=True, messages=messages)
    assert loaded is not None and loaded.iteration == 0 and loaded.optimizer is None
    for name, (_, tensor) in params.items():
        assert torch.equal(tensor[: SHAPES[name][0][0]], tensors[name][: SHAPES[name][0][0]]), name
    assert any("without checksums" in message for message in messages)
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        load(tmp_path)


def test_no_other_attribute_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_megatron(tmp_path, monkeypatch, lambda member: (getattr, (Namespace, "__init__")))
    with pytest.raises(CheckpointError, match=r"it asks for the attribute '__init__' of .*argparse\.Namespace"):
        load(tmp_path, finetune=True)


def test_the_vocabulary_may_be_padded_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = write_megatron(tmp_path, monkeypatch)
    params = make_params()
    name = "embedding.word_embeddings.weight"
    wide = torch.ones(2 * PADDED, 8)
    params[name] = (params[name][0], wide)
    load(tmp_path, params, finetune=True)
    assert torch.equal(wide[:13], tensors[name][:13]) and not wide[13:].any()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"checkpoint_version": 0}, "QKV order"),
        ({"model": {"language_model": {"embedding": {}, "encoder": {}}}}, r"no language_model\.embedding"),
        ({"model": {}}, "not a GPT checkpoint"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    write_megatron(tmp_path, monkeypatch, **changes)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, finetune=True)


def test_split_foreign_checkpoints_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_megatron(tmp_path, monkeypatch)
    (tmp_path / "iter_0000500/mp_rank_01").mkdir()
    with pytest.raises(CheckpointError, match="2 model-parallel files"):
        load(tmp_path, finetune=True)


def test_our_own_step_without_its_manifest_is_not_taken_for_foreign(tmp_path: Path) -> None:
    save(tmp_path, make_state())
    (tmp_path / "iter_0000010/manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        load(tmp_path, finetune=True)


@pytest.mark.parametrize("finetune", [False, True])
def test_a_distributed_format_is_refused_by_name(tmp_path: Path, finetune: bool) -> None:
    step = tmp_path / "iter_0000500"
    step.mkdir()
    for name in (".metadata", "common.pt", "__0_0.distcp"):
        (step / name).touch()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("500")
    with pytest.raises(CheckpointError, match=r"iter_0000500 is in a distributed format .*--ckpt-format torch at TP 1"):
        load(tmp_path, finetune=finetune)
