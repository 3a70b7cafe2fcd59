"""configs/: files that name a preset and add training settings, and the table of docs/configs.md about them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron.config import parse_args
from megatron.config.presets import PRESETS
from megatron.config.yaml_file import shipped_configs
from megatron.errors import ConfigError
from tests.helpers.runs import REPOSITORY, pretrain_here

TABLE = (REPOSITORY / "docs" / "configs.md").read_text().splitlines()
CELLS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE if line.startswith("| `")]
ROWS = {name.strip("`"): cells for name, *cells in CELLS}
MAY_DIFFER = {"attention-dropout", "hidden-dropout", "init-method-std", "seq-length"}
"""Keys of the section of the model that are settings of a training, or that its authors left open."""
SMALL = shlex.split("""--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 16
    --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 2 --tensor-model-parallel-size 1
    --sequence-parallel=false --pipeline-model-parallel-size 1 --expert-model-parallel-size 1 --mock-data
    --vocab-size 97 --make-vocab-size-divisible-by 16 --log-interval 1 --eval-iters 0 --num-workers 0
    --device cpu""")
MOCK = ["--mock-data", "--vocab-size", "50257"]


def content(name: str) -> dict[str, object]:
    return yaml.safe_load(shipped_configs()[name].read_text())


@pytest.mark.parametrize("name", shipped_configs())
def test_a_config_states_no_shape(name: str) -> None:
    keys = content(name).keys()
    assert content(name)["model"] in PRESETS
    shapes = {key.replace("_", "-") for preset in PRESETS.values() for key in preset} - MAY_DIFFER
    assert not keys & shapes, "the preset says it"


@pytest.mark.parametrize("name", shipped_configs())
def test_a_config_trains_two_steps_in_small(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    given = content(name)
    small = [*SMALL, "--kv-channels", "8"] if "kv_channels" in PRESETS[str(given["model"])] else SMALL
    if "num_query_groups" in PRESETS[str(given["model"])]:
        small = [*small, "--num-query-groups", "2"]
    if "num_experts" in PRESETS[str(given["model"])]:
        small = [*small, "--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32"]
    if "train-samples" in given:
        length = "--train-samples 4 --lr-decay-samples 4 --lr-warmup-samples 1 --rampup-batch-size 2 2 4"
    elif "lr-warmup-iters" in given:
        length = "--train-iters 2 --lr-decay-iters 2 --lr-warmup-iters 1"
    else:
        length = "--train-iters 2"
    assert pretrain_here(["--config", name, *small, *length.split()]) == 0
    assert "all iterations are done" in capfd.readouterr().out


@pytest.mark.parametrize("name", shipped_configs())
def test_the_table_tells_what_a_dry_run_computes(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert row_of(name, ROWS[name][1], capfd) == ROWS[name][:5]


def row_of(name: str, devices: str, capfd: pytest.CaptureFixture[str]) -> list[str]:
    """Model, devices, layout, memory and tokens, as the table has them."""
    plan = ["--dry-run", "--dry-run-ranks", devices, "--device-memory", "80GB"]
    assert pretrain_here(["--config", name, *MOCK, *plan]) == 0
    said = capfd.readouterr().out
    config = parse_args(["--config", name, *MOCK])
    sizes = {axis: getattr(config.parallel, f"{axis}_model_parallel_size") for axis in ("tensor", "pipeline", "expert")}
    layout = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    data = re.search(r"data parallel (\d+)\)", said)
    memory = re.search(r"memory per rank +(.*?) of weights.*?activations +(.*?) on the rank", said, re.DOTALL)
    tokens = re.search(r"^ *tokens +(\d+)", said, re.MULTILINE)
    assert data and memory and tokens, said
    layout.append(f"data {data[1]}")
    total = f"{memory[1]} + {memory[2]}"
    return [f"`{config.model.model}`", devices, ", ".join(layout), total, f"{float(tokens[1]):.2g}"]


def test_every_config_has_its_row_and_every_loss_its_source() -> None:
    assert ROWS.keys() == shipped_configs().keys()
    for name, row in ROWS.items():
        assert re.fullmatch(r"measured.*|published by .*|never run", row[6]), name
        assert (row[5] == "-") == (row[6] == "never run"), name


def test_a_name_that_is_not_shipped_is_one_line_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"--config lama3-8b: no such file.*did you mean llama3-8b\?.*gpt2-124m"):
        parse_args(["--config", "lama3-8b", *MOCK])
    with pytest.raises(ConfigError, match=r"--config gpt2-medium: no such file.*did you mean gpt2-345m\?"):
        parse_args(["--config", "gpt2-medium", *MOCK])


def test_a_file_of_the_users_comes_before_a_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ("model: gpt2-345m", "seq-length: 64", "micro-batch-size: 1", "lr: 1.0e-4", "train-iters: 1")
    (tmp_path / "gpt2-124m").write_text("\n".join(settings))
    assert parse_args(["--config", "gpt2-124m", *MOCK]).model.num_layers == 24


def test_a_wheel_has_the_configs_where_they_are_looked_for(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path / "lib")]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    code = "from megatron.config.yaml_file import shipped_configs as s; print(*(p for p in s().values()), sep=chr(10))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "lib", check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == [
        str(tmp_path / "lib/megatron/configs" / f"{name}.yaml") for name in shipped_configs()
    ]
