"""One rank of test_launchers.py: joins, sums over the ranks, prints what it knows as JSON, leaves."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.distributed import collectives
from megatron.distributed.cores import set_threads
from megatron.distributed.launch import LaunchInfo, die_with_parent, shutdown
from megatron.distributed.parallel_state import ParallelState
from megatron.distributed.rendezvous import init_process_group
from megatron.errors import MegatronError
from megatron.layout import Layout


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local-rank", "--local_rank", type=int)
    parser.add_argument("--die-at-first-attempt", action="store_true")
    parser.add_argument("--sleep", type=Path, help="write the process id there, then sleep")
    parser.add_argument("--timeout", type=float, default=60)
    args = parser.parse_args()
    info = LaunchInfo.detect(args.local_rank)
    guarded = die_with_parent(info)
    if args.sleep:
        args.sleep.write_text(str(os.getpid()))
        time.sleep(120)
    threads = set_threads(info)
    timeout = timedelta(seconds=args.timeout)
    init_process_group(info, "gloo", timeout)
    state = ParallelState.build(Layout(info.world_size), info.rank, timeout)
    total = collectives.all_reduce(torch.tensor([info.rank + 1.0]), state.dp).item()
    if args.die_at_first_attempt and info.attempt == 0:
        if info.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        collectives.all_reduce(torch.zeros(1), state.dp)
    report = {
        "rank": info.rank,
        "local_rank": info.local_rank,
        "world_size": info.world_size,
        "total": total,
        "threads": threads,
        "attempt": info.attempt,
        "launcher": info.launcher,
        "guarded": guarded,
    }
    print(f"REPORT {json.dumps(report)}", flush=True)
    shutdown()


if __name__ == "__main__":
    try:
        main()
    except MegatronError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
