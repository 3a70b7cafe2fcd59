"""--dry-run predicts what a rank will hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from megatron.config import parse_args
from megatron.distributed.parallel_state import ParallelState
from megatron.errors import ConfigError
from megatron.model.flops import flops_per_token
from megatron.parallelize import check_can_be_split, held_parameters
from megatron.training.dry_run import render_plan
from megatron.training.initialize import Run
from megatron.training.model import ModelProvider, _provided, build_model
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import flags, make_run, pretrain_gpt, pretrain_here

EXPERTS = {"num_experts": 4, "disable_bias_linear": True, "expert_model_parallel_size": 2}


def count_parameters(run: Run, model_provider: ModelProvider, rank: int) -> int:
    """Parameters that `rank` will hold, counted as --dry-run does: without memory or communication."""
    state = ParallelState.plan(run.config.parallel.layout(run.launch.world_size), rank)
    model = _provided(run, model_provider, torch.device("meta"))
    check_can_be_split(model, run.config.parallel, state)
    return held_parameters(model, run.config.parallel, state)


def planned_and_held(rank: int, argv: list[str]) -> tuple[int, int, str]:
    torch.set_num_threads(1)
    run, script = make_run(parse_args(argv), rank=rank, world_size=4), pretrain_gpt()
    planned = count_parameters(run, script.model_provider, rank)
    built = build_model(run, script.model_provider, script.forward_step).model
    return planned, sum(p.numel() for p in built.parameters()), render_plan(run, script.model_provider)


@pytest.mark.parametrize("more", [{"tensor_model_parallel_size": 2}, EXPERTS], ids=["tensor", "experts"])
def test_the_largest_share(more: dict[str, Any]) -> None:
    ranks = run_ranks(4, planned_and_held, flags(num_layers=4, pipeline_model_parallel_size=2, **more))
    assert all(planned == held for planned, held, _ in ranks)
    assert f"at most {max(held for _, held, _ in ranks)} on a rank" in ranks[0][2]


def planned(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, str]]:
    """The exit code, and the plan's rows by name."""
    code = pretrain_here([*argv, "--dry-run"])
    said = capsys.readouterr()
    rows = [
        line.strip().split("  ", 1)
        for line in said.out.partition("dry run: ")[2].partition("\nnot checked")[0].splitlines()[1:]
    ]
    return code, {name: text.strip() for name, text in rows} | {"error": said.err}


def test_one_process_plans_for_many(capsys: pytest.CaptureFixture[str]) -> None:
    argv = flags(
        num_layers=8, tensor_model_parallel_size=4, pipeline_model_parallel_size=2, sequence_parallel=True,
        num_layers_per_virtual_pipeline_stage=2,
    )  # fmt: skip
    code, rows = planned([*argv, "--dry-run-ranks", "16"], capsys)
    assert code == 0 and rows["ranks"] == "16 (data parallel 2)"
    assert rows["tensor groups"] == "0-3 | 4-7 | 8-11 | 12-15"
    assert rows["data groups"] == "0 4 | 1 5 | ... | 11 15"
    assert rows["pipeline groups"] == "0 8 | 1 9 | ... | 7 15"
    assert rows["stage 0"].startswith("ranks 0-7: layers 0-1, 4-5, embedding; ")
    assert rows["stage 1"].startswith("ranks 8-15: layers 2-3, 6-7, head; ")
    held = [int(rows[f"stage {stage}"].split("; ")[1].split()[0]) for stage in (0, 1)]
    assert f"at most {max(held)} on a rank" in rows["parameters"]


@pytest.mark.parametrize(
    ("more", "ranks"),
    [
        ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 4),
        ({**EXPERTS, "context_parallel_size": 2}, 2),
        ({**EXPERTS, "tensor_model_parallel_size": 2}, 4),
        ({}, 1),
    ],
)
def test_unset_it_is_the_smallest_world(more: dict[str, Any], ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    code, rows = planned(flags(**more), capsys)
    assert code == 0 and rows["ranks"].startswith(f"{ranks} (data parallel ")


def test_the_work_is_what_the_run_will_report(capsys: pytest.CaptureFixture[str]) -> None:
    config = parse_args(argv := flags(num_experts=4, disable_bias_linear=True))
    per_token = flops_per_token(config.model, seq_length=16, padded_vocab_size=112, moe=config.moe)
    assert planned(argv, capsys)[1]["compute"].startswith(f"{per_token * 6 * 8 * 16:.3e} FLOP")


def test_a_world_that_does_not_fit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, rows = planned([*flags(tensor_model_parallel_size=2), "--dry-run-ranks", "3"], capsys)
    assert (
        code == 2
        and "--tensor-model-parallel-size 2: --dry-run-ranks 3 is not divisible by 2; use --dry-run-ranks 2 or 4"
        in rows["error"]
    )
    assert pretrain_here([*flags(), "--dry-run-ranks", "3"]) == 2
    assert "--dry-run-ranks 3: requires one process with --dry-run" in capsys.readouterr().err


def test_a_model_of_ones_own_is_not_split() -> None:
    config = parse_args(flags(num_experts=4, disable_bias_linear=True, expert_model_parallel_size=2))
    run = replace(make_run(parse_args(flags())), config=config)
    for build in (
        lambda: count_parameters(replace(run, launch=replace(run.launch, world_size=2)), lambda _: nn.Linear(2, 2), 0),
        lambda: build_model(run, lambda _: nn.Linear(2, 2), lambda *_: None),  # type: ignore[arg-type,return-value]
    ):
        with pytest.raises(
            ConfigError, match=r"--expert-model-parallel-size only split Megatron's GPT.*returned a Linear"
        ):
            build()
