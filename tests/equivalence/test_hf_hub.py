"""Exports to a small Hub on this machine, as the page shows; the download equals the upload."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron.cli.convert_checkpoint import main as convert
from megatron.config import ModelConfig
from tests.docs.blocks import ROOT, blocks_of
from tests.equivalence.test_hf_export import LLAMA
from tests.helpers.fake_hub import Hub, fake_hub
from tests.unit.checkpoint.test_tools import save_model

pytest.importorskip("transformers")

FOLDER, REPO = "runs/first-hf", "me/my-model"  # of the page
BACK = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], device_map="auto")
tokens = AutoTokenizer.from_pretrained(sys.argv[1])("abcdef")["input_ids"]
torch.save({"weights": dict(model.state_dict()), "tokens": tokens, "ids": model.config.eos_token_id}, sys.argv[2])
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with fake_hub() as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds an export of several files under the page's name."""
    made = tmp_path_factory.mktemp("export")
    config = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, **LLAMA)
    save_model(made / "run", config)
    command = ["--load", str(made / "run"), "--to", "hf", "--save", str(made / FOLDER), "--max-shard-size", "30KB"]
    assert convert(command) == 0
    return made


def run(hub: Hub, folder: Path, home: str, *command: str) -> str:
    environment = {**os.environ, **hub.environment(folder / home)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def check_what_comes_down(hub: Hub, folder: Path, repo: str) -> None:
    """Downloads in a process with an empty cache, and compares."""
    name = repo.replace("/", "-")
    run(hub, folder, f"cache of {name}", sys.executable, "-c", BACK, repo, name)
    found, expected = torch.load(folder / name, weights_only=True), weights_of(folder / FOLDER)
    assert found["weights"].keys() == expected.keys()
    assert all(torch.equal(found["weights"][key], tensor) for key, tensor in expected.items())
    assert found["tokens"] == [1, 2, 3, 4, 5, 6] and found["ids"] == 0


def test_push_to_hub_as_the_page_says(hub: Hub, folder: Path) -> None:
    page = "docs/from_transformers.md"
    blocks = blocks_of((ROOT / page).read_text(), page)
    (block,) = [block for block in blocks if block.language == "python" and "push_to_hub" in block.text]
    assert FOLDER in block.text and REPO in block.text
    run(hub, folder, "home", sys.executable, "-c", block.text)
    assert {"config.json", "tokenizer.json", "generation_config.json"} <= hub.repos[REPO].keys()
    assert hub.tokens == {"Bearer hf_of_a_test"}
    check_what_comes_down(hub, folder, REPO)


def test_the_files_as_they_were_written(hub: Hub, folder: Path) -> None:
    assert f"`hf upload {REPO} {FOLDER}`" in (ROOT / "docs/from_transformers.md").read_text()
    run(hub, folder, "home", sys.executable, "-m", "huggingface_hub.cli.hf", "upload", "me/as-written", FOLDER)
    written = {path.name: path.read_bytes() for path in (folder / FOLDER).iterdir()}
    assert {name: hub.repos["me/as-written"].get(name) for name in written} == written
    check_what_comes_down(hub, folder, "me/as-written")
