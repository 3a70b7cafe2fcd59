"""A model for inference is loaded as in training: each byte is read once and hashed on its way into the model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint import reader, storage
from megatron.model.parameters import WORD_TABLE
from tests.helpers.runs import generate_here
from tests.unit.cli.test_evaluate import load  # noqa: F401  (a fixture)


def test_every_byte_is_read_once(load: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    handed: list[int] = []
    memory_for = storage._memory_for

    def counted(*where: Any) -> Iterator[memoryview]:
        for memory in memory_for(*where):
            handed.append(len(memory))
            yield memory

    monkeypatch.setattr(storage, "_memory_for", counted)
    elements, copied = reader.StepReader.elements, []
    monkeypatch.setattr(
        reader.StepReader, "elements", lambda self, spec, *rest: copied.append(spec.name) or elements(self, spec, *rest)
    )
    assert generate_here("--load", load, "--prompt", "x", "--max-new-tokens", "1") == 0
    (step,) = load.glob("iter_*")
    files = [path for path in step.rglob("*") if path.is_file() and path.name != "manifest.json"]
    assert copied == [WORD_TABLE]  # the training padded it otherwise
    assert sum(handed) == sum(path.stat().st_size for path in files)


def test_damage_is_one_line(load: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    shutil.copytree(load, tmp_path / "run")
    (file,) = (tmp_path / "run").rglob("model_optim_rng.pt")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert generate_here("--load", tmp_path / "run", "--prompt", "x") == 12
    said = capsys.readouterr()
    assert "differs from what was written" in said.err and "was tried; there is no other step" in said.err
    assert "Traceback" not in said.err and not said.out
