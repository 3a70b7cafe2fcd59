"""--dry-run: what it says a rank will hold is what the rank then holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.config import parse_args
from megatron.training.model import build_model, held_parameters
from megatron.training.plan import render_plan
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import flags, make_run, pretrain_gpt

EXPERTS = {"num_experts": 4, "disable_bias_linear": True, "expert_model_parallel_size": 2}


def planned_and_held(rank: int, argv: list[str]) -> tuple[int, int, str]:
    torch.set_num_threads(1)
    run, script = make_run(parse_args(argv), rank=rank, world_size=4), pretrain_gpt()
    planned = held_parameters(run, script.model_provider, rank)
    built = build_model(run, script.model_provider, script.forward_step).model
    return planned, sum(p.numel() for p in built.parameters()), render_plan(run, script.model_provider)


@pytest.mark.parametrize("more", [{"tensor_model_parallel_size": 2}, EXPERTS], ids=["tensor", "experts"])
def test_the_largest_share(more: dict[str, Any]) -> None:
    ranks = run_ranks(4, planned_and_held, flags(num_layers=4, pipeline_model_parallel_size=2, **more))
    assert all(planned == held for planned, held, _ in ranks)
    assert f"at most {max(held for _, held, _ in ranks)} on a rank" in ranks[0][2]
