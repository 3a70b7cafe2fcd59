"""A run converted to Megatron-LM's format and back continues as if it had never stopped, on one rank and on other
numbers of ranks than the tree was written for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.cli import convert_checkpoint as convert_cli
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import LLAMA_SHAPE, Recorder, flags, make_parts, same_numbers, train_here

RUN: dict[str, Any] = {
    **LLAMA_SHAPE,
    "num_layers": 4,
    "num_query_groups": 2,
    "group_query_attention": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "adam_beta2": 0.95,
}
GPT2: dict[str, Any] = {"num_layers": 4, "attention_dropout": 0.0, "hidden_dropout": 0.0}


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def trees(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of six steps, and its third step as trees of Megatron-LM."""
    folder, settings = tmp_path_factory.mktemp("run"), RUN if request.param == "llama" else GPT2
    whole = train_here(flags(**settings, save=folder / "native", save_interval=3))["records"]
    command = ["--load", str(folder / "native"), "--to", "megatron", "--ckpt-step", "3"]
    names = "te" if request.param == "llama" else "classic"
    for tp, pp in ((1, 2), (2, 1)):
        sizes = [f"--target-tensor-parallel-size={tp}", f"--target-pipeline-parallel-size={pp}"]
        save = ["--save", str(folder / f"tp{tp} pp{pp}"), f"--megatron-names={names}"]
        assert convert_cli.main([*command, *save, *sizes]) == 0
    return {"settings": settings, "whole": whole, "folder": folder}


def continued(trees: dict[str, Any], tree: str, **changes: Any) -> list[str]:
    return flags(**trees["settings"], load=trees["folder"] / tree, no_load_rng=True, **changes)


@pytest.mark.parametrize("tree", ["tp1 pp2", "tp2 pp1"])
def test_on_one_rank_every_number_is_that_of_the_run_that_went_on(trees: dict[str, Any], tree: str) -> None:
    records = train_here(continued(trees, tree))["records"]
    assert [same_numbers(record) for record in records] == [same_numbers(record) for record in trees["whole"][3:]]


def on_rank(rank: int, argv: list[str]) -> list[tuple[int, float, float]]:
    torch.set_num_threads(1)
    records: list[dict[str, Any]] = []
    _, parts = make_parts(argv, [Recorder(records)], rank=rank, world_size=4)
    with parts:
        parts.trainer.fit()
    return [(record["iteration"], record["lm_loss"], record["grad_norm"]) for record in records]


def on_four_ranks(trees: dict[str, Any], tree: str) -> list[tuple[int, float, float]]:
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    return run_ranks(4, on_rank, continued(trees, tree, **layout))[-1]


def numbers(trees: dict[str, Any]) -> list[Any]:
    found = [(record["iteration"], record["lm_loss"], record["grad_norm"]) for record in trees["whole"][3:]]
    return [pytest.approx(each, rel=2e-4) for each in found]


def test_at_tp2_pp2_from_a_tree_of_tp1_pp2(trees: dict[str, Any]) -> None:
    assert on_four_ranks(trees, "tp1 pp2") == numbers(trees)
