"""Launchers of large models: their commands at full size, and a small run of each."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from megatron.config import ModelConfig, parse_args
from megatron.config.presets import PRESETS
from tests.helpers.launchers import SMALL, Material, clean_environment, printed_command, start
from tests.helpers.runs import pretrain_here

# launcher -> its preset, its ranks, its data-parallel size
LAUNCHERS = {
    "gpt3_175b": ("gpt3-175b", 1024, 8),
    "llama3_8b": ("llama3-8b", 64, 32),
    "llama3_70b": ("llama3-70b", 512, 16),
    "qwen3_0.6b": ("qwen3-0.6b", 8, 8),
    "mixtral_8x7b": ("mixtral-8x7b", 64, 16),
    "zero3_one_node": ("llama2-7b", 8, 8),
}
# Settings that a preset leaves to the user or that have two spellings.
NOT_OF_THE_SHAPE = {"model", "seq_length", "init_method_std", "num_query_groups", "kv_channels"}
NOT_OF_THE_SHAPE |= {"group_query_attention", "attention_dropout", "hidden_dropout"}
# In small on two ranks: what differs from the launcher's layout, or from SMALL.
IN_SMALL = {
    "gpt3_175b": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --rampup-batch-size 2 2 4 "
    "--train-samples 8 --lr-decay-samples 8 --lr-warmup-samples 2",
    "llama3_8b": "",
    "llama3_70b": "--tensor-model-parallel-size 1 --sequence-parallel=false --pipeline-model-parallel-size 2 "
    "--num-layers-per-virtual-pipeline-stage 1",
    "mixtral_8x7b": "--pipeline-model-parallel-size 1 --num-experts 4 --expert-model-parallel-size 2",
    "zero3_one_node": "",
}


@cache
def command(launcher: str) -> tuple[list[str], list[str]]:
    return printed_command(launcher)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return Material.made_in(tmp_path_factory.mktemp("launchers"))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_printed_command_is_the_published_model(launcher: str) -> None:
    preset, _, _ = LAUNCHERS[launcher]
    config, values = parse_args(command(launcher)[1]), PRESETS[preset]
    model = config.model
    published = ModelConfig(**{name: v for name, v in values.items() if hasattr(ModelConfig, name)})
    names = [name for name in vars(published) if name not in NOT_OF_THE_SHAPE]
    assert {name: getattr(model, name) for name in names} == {name: getattr(published, name) for name in names}
    experts = {name: value for name, value in values.items() if hasattr(config.moe, name)}
    assert {name: getattr(config.moe, name) for name in experts} == experts
    assert (model.query_groups, model.head_dim) == (published.query_groups, published.head_dim)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_printed_command_is_valid_at_its_number_of_ranks(
    launcher: str, material: Material, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """This test's tokenizer and dataset replace the real ones; everything else is as printed."""
    program, flags = command(launcher)
    _, ranks, dp = LAUNCHERS[launcher]
    machines = re.findall(r"--nproc_per_node (\d+)(?: --nnodes (\d+))?", " ".join(program))
    assert [int(each) * int(count or 1) for each, count in machines] == [ranks]
    small = {f"--{name.lower().replace('_', '-')}": str(path) for name, path in material.names.items()}
    small |= {"--save": str(tmp_path), "--load": str(tmp_path)}
    planned = [small.get(before, word) for word, before in zip(flags, ["", *flags], strict=False)]
    planned += ["--dry-run", "--dry-run-ranks", str(ranks)]
    assert pretrain_here(planned) == 0
    said = capsys.readouterr().out
    assert "dry run: all settings are valid" in said and f"{ranks} (data parallel {dp})" in said


@pytest.mark.parametrize("launcher", IN_SMALL)
def test_a_launcher_in_small(launcher: str, material: Material) -> None:
    own = IN_SMALL[launcher].split()
    drop = {"--train-iters", "--lr-warmup-iters"} if "--train-samples" in own else set()
    small = [word for word, before in zip(SMALL, ["", *SMALL], strict=False) if not {word, before} & drop]
    done = start(launcher, [*small, *own], material.environment(launcher, GPUS_PER_NODE=2, NNODES=1))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "running on 2 x" in done.stdout and "all iterations are done" in done.stdout
    assert list((material.folder / launcher).glob("iter_*/manifest.json"))


def test_several_machines_say_who_they_are() -> None:
    program, _ = command("llama3_8b")
    assert program[-4:] == ["--master_addr", "$MASTER_ADDR", "--master_port", "6000"] and "$NODE_RANK" in program
    program, _ = printed_command("llama3_8b", NNODES=2, NODE_RANK=1, MASTER_ADDR="first")
    assert program[-8:-2] == ["--nnodes", "2", "--node_rank", "1", "--master_addr", "first"]
    for given in ({}, {"MASTER_ADDR": "first"}, {"NODE_RANK": "0"}):
        done = start("llama3_8b", [], clean_environment(**given))
        assert done.returncode == 2 and done.stderr.startswith("error: NNODES=8: every machine needs MASTER_ADDR")
        assert len(done.stderr.splitlines()) == 1


def test_what_is_typed_behind_a_launcher_is_printed_once_and_checked() -> None:
    done = start("llama3_8b", ["--dry-run", "--global-batch-size", "511"], clean_environment())
    assert done.returncode == 2 and done.stdout.count("--global-batch-size") == 1, done.stdout
    assert "--global-batch-size 511 " in done.stdout and done.stderr.startswith("error: --global-batch-size 511")
    assert len(done.stderr.splitlines()) == 1, "that no file is there yet is no mistake of a plan"


def test_with_its_files_there_the_plan_is_printed(material: Material) -> None:
    done = start("qwen3_0.6b", ["--dry-run"], material.environment("plan"))
    assert done.returncode == 0, done.stderr
    assert "dry run: all settings are valid" in done.stdout and "8 (data parallel 8)" in done.stdout
    assert not (material.folder / "plan").exists()
