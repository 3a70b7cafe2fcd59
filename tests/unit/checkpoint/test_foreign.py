"""--load given something else than a checkpoint: one line that names what it is and the way in."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.checkpoint import convert_cli
from megatron.checkpoint.find import find_candidates
from megatron.errors import ConfigError
from megatron.utils.foreign import hub_hint, is_hugging_face


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "model/model.safetensors").touch()
    return tmp_path / "model"


def convert(*flags: str, capsys: pytest.CaptureFixture[str]) -> str:
    to = [] if "--to" in flags else ["--to", "native"]
    assert convert_cli.main([*flags, *to, "--save", "out"]) == ConfigError.exit_code
    return capsys.readouterr().err


def test_a_hugging_face_folder_is_named_with_the_way_in(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"holds a Hugging Face model: import it with .*--from hf"):
        find_candidates(folder)
    told = convert("--load", str(folder), "--from", "native", "--to", "hf", capsys=capsys)
    assert "holds a Hugging Face model: import it" in told


def test_a_configuration_without_weights_is_no_model(folder: Path) -> None:
    assert is_hugging_face(folder)
    (folder / "model.safetensors").unlink()
    assert not is_hugging_face(folder)


def test_a_name_of_the_hub_is_told_how_to_fetch_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"hf download Qwen/Qwen3-0.6B --local-dir DIR"):
        find_candidates(Path("Qwen/Qwen3-0.6B"))
    assert "hf download gpt2 " in convert("--from", "hf", "--load", "gpt2", capsys=capsys)


@pytest.mark.parametrize("path", ["/data/model", "../model", "a/b/c", ".hidden"])
def test_other_paths_are_no_names_of_the_hub(path: str) -> None:
    assert hub_hint(Path(path)) == ""
