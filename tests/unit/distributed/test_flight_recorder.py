"""The last collectives in torch's own record."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from megatron.distributed.flight_recorder import last_entries

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


def record(*entries: tuple[str, int, str]) -> bytes:
    described = [
        {
            "profiling_name": name,
            "time_created_ns": time,
            "state": state,
            "retired": state == "completed",
            "collective_seq_id": time,
            "input_sizes": [[4]],
            "process_group": ["7", "tp"],
        }
        for name, time, state in entries
    ]
    return json.dumps({"entries": described}).encode()


def test_what_nccl_has_under_way_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps separate records for NCCL and for gloo, which sends plain values beside it."""
    recorder = torch._C._distributed_c10d
    of_gloo, of_nccl = ("gloo:all_gather", 3, "completed"), ("nccl:all_reduce", 2, "started")
    monkeypatch.setattr(recorder, "_dump_fr_trace_json", lambda: record(of_gloo), raising=False)
    assert last_entries() == ["gloo:all_gather 3 of [[4]] over tp: completed"]
    monkeypatch.setattr(recorder, "_dump_nccl_trace_json", lambda: record(of_nccl), raising=False)
    assert last_entries() == ["nccl:all_reduce 2 of [[4]] over tp: started"]
    later = record((*of_nccl[:2], "completed"), ("nccl:send", 5, "completed"))
    monkeypatch.setattr(recorder, "_dump_nccl_trace_json", lambda: later)
    assert [line.split()[0] for line in last_entries(2)] == ["gloo:all_gather", "nccl:send"]
