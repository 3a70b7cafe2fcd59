"""Functions that DeepSpeed's programs call before `initialize`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from megatron.compat import add_config_arguments, init_distributed, initialize
from megatron.distributed.launch import shutdown
from megatron.errors import ConfigError
from tests.helpers.runs import REPOSITORY, launch

PROGRAM = f"""
import sys; sys.path.insert(0, {str(REPOSITORY)!r})
import argparse, torch, megatron.compat as deepspeed
from megatron.utils.log import print_line
args = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args()
deepspeed.init_distributed()
assert torch.distributed.get_world_size() == 2
model = torch.nn.Linear(2, 2)
engine = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())[0]
rank = torch.distributed.get_rank()
engine.backward(engine(torch.full((2, 2), 1.0 + rank)).sum())
engine.step()
total = engine.whole_state_dict()["weight"].sum().item()
print_line(f"rank {{rank}} of {{engine.world_size}}: {{total:.6f}}", sys.stdout)
"""
CONFIG = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}


@pytest.fixture
def no_group() -> Iterator[None]:
    assert not dist.is_initialized()
    yield
    shutdown(barrier=False)


@pytest.mark.usefixtures("no_group")
def test_the_first_lines_of_a_program_for_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    parser = add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(tmp_path / "ds.json")])
    assert args.deepspeed
    init_distributed()
    init_distributed(dist_backend="nccl")  # one is open, and is used
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    model = nn.Linear(2, 2)
    engine = initialize(args=args, model=model, model_parameters=model.parameters())[0]
    assert engine.get_lr() == [0.01]


@pytest.mark.usefixtures("no_group")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dist_backend": "nccl"}, r"dist_backend nccl: needs an accelerator, .* use gloo, or remove it"),
        (
            {"init_method": "env://"},
            "the launcher sets init_method, rank and world_size; remove them and start the program with",
        ),
        ({"rank": 1, "world_size": 2}, "the launcher sets init_method, rank and world_size"),
    ],
)
def test_what_it_cannot_follow_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        init_distributed(**given)
    assert not dist.is_initialized()


def test_its_ranks_are_those_of_torchrun(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "ds.json").write_text(json.dumps({**CONFIG, "zero_optimization": {"stage": 2}}))
    done = launch(["--deepspeed_config", str(tmp_path / "ds.json")], ranks=2, script=tmp_path / "program.py")
    assert done.returncode == 0, done.stderr
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    assert [line.split(":")[0] for line in said] == ["rank 0 of 2", "rank 1 of 2"]
    assert len({line.split(": ")[1] for line in said}) == 1, "both hold the same weights"
