"""The last collectives by torch's own record."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import torch, torch.distributed as dist
from megatron.distributed import flight_recorder
print(flight_recorder.last_entries())
flight_recorder.switch_on()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for size in range(1, 9):
    dist.all_reduce(torch.ones(size))
dist.destroy_process_group()  # waits for gloo's thread, which may note an end after the caller has gone on
print(*flight_recorder.last_entries(count=2), sep="\\n")
"""


def test_the_last_collectives_are_told_once_the_recorder_is_on() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_")}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    before, *last = done.stdout.splitlines()
    assert before == "[]"
    assert [line.rpartition(": ")[0] for line in last] == [
        "gloo:all_reduce 7 of [[7]] over default_pg",
        "gloo:all_reduce 8 of [[8]] over default_pg",
    ]
