"""A --load path that is not a checkpoint gives one line with its kind and the fix."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron.checkpoint.find import find_candidates
from megatron.cli import convert_checkpoint as convert_cli
from megatron.errors import CheckpointError, ConfigError
from megatron.interop.hf.families import by_model_type
from megatron.interop.hf.importer import open_folder
from megatron.utils.foreign import is_hugging_face, model_meant
from tests.helpers.other_programs import read_settings
from tests.helpers.runs import flags

CONFIG = json.dumps(
    {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
    }
)


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


def test_a_part_of_a_model_is_one_that_lacks_something(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "config.json").write_text(CONFIG)
    started = ["--load", str(folder), "--finetune", *flags(num_layers=None, hidden_size=None, num_attention_heads=None)]
    with pytest.raises(ConfigError, match=r"no model\.safetensors and no pytorch_model\.bin; other formats of weights"):
        read_settings(started)
    partly = folder / ".cache/huggingface/download/model.safetensors.abc.incomplete"
    partly.parent.mkdir(parents=True)
    partly.touch()
    with pytest.raises(CheckpointError, match=r"but \.cache/.*incomplete; the download is not complete: run it again"):
        read_settings(started)
    (folder / "config.json").rename(tmp_path / "model/model.safetensors")
    with pytest.raises(ConfigError, match=r"config\.json does not exist; give the folder of a Hugging Face model"):
        read_settings(started)
    with pytest.raises(ConfigError, match=r"model\.safetensors: is not a directory; give a directory"):
        read_settings(["--load", str(folder / "model.safetensors"), *started[2:]])
    (folder / "latest_checkpointed_iteration.txt").touch()
    assert not is_hugging_face(folder), "of ours"
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        ConfigError, match=r"model\.gguf: is a file of llama\.cpp, whose format is not supported; give the Hu"
    ):
        find_candidates(tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match=r"model\.gguf: is a file of llama\.cpp, whose format is not supported"):
        open_folder(tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match="nothing: no such directory"):
        open_folder(tmp_path / "nothing")


def test_what_is_nearest_to_an_unknown_family() -> None:
    for name, told in (
        ("smollm3", "the nearest is llama, which lacks layers without rotation"),
        ("qwen3_next", "the nearest is qwen3_moe, which lacks linear attention"),
        ("llama_2", "did its author mean llama?"),
    ):
        with pytest.raises(ConfigError, match=re.escape(told)):
            by_model_type(name)
    with pytest.raises(ConfigError, match=r"supported: [a-z0-9_, ]*$"):
        by_model_type("mamba")  # only its letters are near


def test_a_name_of_the_hub_is_told_how_to_fetch_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"hf download Qwen/Qwen3-0.6B --local-dir DIR"):
        find_candidates(Path("Qwen/Qwen3-0.6B"))
    assert "hf download gpt2 " in convert("--from", "hf", "--load", "gpt2", capsys=capsys)


@pytest.mark.parametrize("path", ["/data/model", "../model", "a/b/c", ".hidden"])
def test_other_paths_are_no_names_of_the_hub(path: str) -> None:
    assert model_meant(Path(path)) == ""


def test_a_misspelt_folder_is_told_the_nearest_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine/run", "mine/hf", "mine/rune"):
        Path(name).mkdir(parents=True)
    Path("mine/run/latest_checkpointed_iteration.txt").write_text("1")
    Path("mine/hf/config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"give a directory with checkpoints; did you mean mine/run\?$"):
        find_candidates(Path("mine/rnu"))
    assert convert("--load", "mine/hfx", capsys=capsys).endswith("no such directory; did you mean mine/hf?\n")
    assert convert("--load", "mine/other", capsys=capsys).endswith("mine/other: no such directory\n")
