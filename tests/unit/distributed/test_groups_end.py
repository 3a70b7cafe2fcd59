"""A process group must end with `shutdown`: if it is still referenced, its threads may abort Python's exit."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.runs import REPOSITORY

SCRIPT = """
import gc, torch, weakref
import torch.distributed as dist
from pathlib import Path
from megatron.distributed.launch import shutdown
from megatron.distributed.rendezvous import open_group_of_one

open_group_of_one(torch.device("cpu"))
world, part = weakref.ref(dist.group.WORLD), weakref.ref(dist.new_group([0]))

def train(model):
    {use}

train(torch.nn.Linear(2, 2))
gc.freeze()  # as where a program that loads torch begins
dist.all_reduce(torch.ones(2))
names = lambda: [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
assert any("gloo" in name for name in names()), names()
shutdown()
assert world() is None and part() is None, "kept"
assert not any("gloo" in name for name in names()), names()
"""
USES = {
    "an optimizer, whose import brings torch's compiler": "torch.optim.SGD(model.parameters(), lr=0.1)",
    "fully_shard": "from torch.distributed.fsdp import fully_shard; fully_shard(model)",
    "DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel(model)(torch.ones(2)).sum().backward()",
    "a compiled model": "torch.compile(model, backend='eager')(torch.ones(2))",
}


@pytest.mark.parametrize("use", USES)
def test_no_group_outlives_it(use: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(use=USES[use])],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
