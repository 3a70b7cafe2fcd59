"""What ranks compare when they meet: every setting but paths, the code, and torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config.run import all_settings
from megatron.training import identity
from megatron.training.identity import started_with
from megatron.training.settings import read_settings
from tests.helpers.runs import flags


def of(**changes: object) -> dict[str, str]:
    return started_with(read_settings(flags(**changes), needs_data=False))


def test_a_setting_shows_and_a_path_does_not(tmp_path: Path) -> None:
    usual = of()
    assert of() == usual
    assert {name for name in usual if of(lr=0.1234)[name] != usual[name]} == {"--lr"}
    assert {name for name in usual if of(seed=99)[name] != usual[name]} == {"--seed"}
    elsewhere = of(save=tmp_path / "ckpt", tensorboard_dir=tmp_path / "tb", data_cache_path=tmp_path / "cache")
    assert elsewhere == usual


def test_every_setting_that_names_a_place_is_marked() -> None:
    words = ("_path", "_dir", "_file", "_jsonl")
    named = [setting for setting in all_settings() if setting.base is str and setting.name.endswith(words)]
    assert len(named) > 10
    assert [setting.name for setting in named if not setting.flag.path and setting.flag.status == "works"] == []
    others = {setting.name for setting in all_settings() if setting.flag.path} - {setting.name for setting in named}
    assert others == {"pipeline_trace", "save", "load", "tokenizer_model"}, "whatever is marked is not compared"


def test_other_code_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("x = 1\n")
    monkeypatch.setattr(identity, "_PACKAGE", tmp_path)
    usual = of()["the code of megatron"]
    assert of()["the code of megatron"] == usual
    (tmp_path / "b.py").write_text("x = 2\n")
    changed = of()["the code of megatron"]
    (tmp_path / "b.py").write_text("")
    (tmp_path / "a.py").write_text("x = 1\nx = 2\n")
    assert len({usual, changed, of()["the code of megatron"]}) == 3
