"""Models other than our GPT have no attention that could split a sequence."""

from __future__ import annotations

from torch import nn

from megatron.config import parse_args
from megatron.errors import ConfigError
from megatron.training.model import build_model
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import flags, make_run


def refusal(rank: int) -> str:
    run = make_run(parse_args(flags(context_parallel_size=2)), rank=rank, world_size=2)
    try:
        build_model(run, lambda _: nn.Linear(2, 2), lambda model, batch: (batch["x"], batch["y"]))
    except ConfigError as error:
        return str(error)
    return ""


def test_it_is_refused() -> None:
    for message in run_ranks(2, refusal):
        assert "--context-parallel-size" in message and "returned a Linear" in message and "\n" not in message
