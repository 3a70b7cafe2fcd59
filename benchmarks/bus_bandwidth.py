"""Bandwidth of our collectives between this machine's devices, compared with torch and nccl-tests.

    python benchmarks/bus_bandwidth.py                     # all GPUs, over nccl
    python benchmarks/bus_bandwidth.py --device cpu --ranks 2 --sizes 1

Bus bandwidth is defined as in nccl-tests, so it can be compared with a link's bandwidth. It is the bytes of the whole
buffer over time, times 2 (n - 1) / n for an all-reduce, 1 for a ring shift and (n - 1) / n for others. Our collectives
and torch's take turns; the result is the median. If `all_reduce_perf` of nccl-tests is on PATH, it runs last.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

MIB = 2**20
Run = Callable[[], object]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, help="number of ranks (default: every GPU, or two on the CPU)")
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 16, 256], help="sizes of the whole buffer in MiB")
    parser.add_argument("--rounds", type=int, default=10)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    import torch

    from megatron.distributed.launch import LaunchInfo

    launch = LaunchInfo.detect()
    if launch.launcher == "torchrun":
        measure(args, launch.local_rank)
        return 0
    ranks = args.ranks or (2 if args.device == "cpu" else torch.cuda.device_count())
    if args.device == "cuda" and ranks < 2:
        print(f"--device cuda: needs two GPUs, found {ranks}", file=sys.stderr)
        return 2
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    code = subprocess.run([*launcher, __file__, *arguments], check=False).returncode
    program = shutil.which("all_reduce_perf")
    if args.device == "cuda":
        command = [program or "all_reduce_perf", "-b", "1M", "-e", "256M", "-f", "16", "-g", str(ranks)]
        print("nccl-tests:", "not installed (nccl-tests)" if program is None else " ".join(command), flush=True)
        if program is not None:
            code = code or subprocess.run(command, check=False).returncode
    return code


def measure(args: argparse.Namespace, local: int) -> None:
    """Runs one rank of the measurement. Rank 0 prints."""
    import torch
    import torch.distributed as dist

    device = torch.device("cpu") if args.device == "cpu" else torch.device("cuda", local)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    for size in args.sizes:
        for name, (ours, theirs, share) in contenders(size * MIB, device).items():
            seconds = in_turns([ours, theirs], args.rounds, device)
            widths = [share * size * MIB / 1e9 / each for each in seconds]
            if dist.get_rank() == 0:
                row = f"{name:<14} {size:5} MiB  ours {widths[0]:8.2f} GB/s  torch {widths[1]:8.2f} GB/s"
                print(f"{row}  ratio {widths[0] / widths[1]:.2f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def contenders(size: int, device: Any) -> dict[str, tuple[Run, Run, float]]:
    """Returns name -> (ours, torch's, share of the buffer that crosses a link), for a whole buffer of `size` bytes."""
    import torch
    import torch.distributed as dist

    from megatron.distributed import collectives
    from megatron.distributed.parallel_state import Axis

    ranks = dist.get_world_size()
    world = Axis("world", dist.get_rank(), ranks, tuple(range(ranks)), dist.group.WORLD)
    whole = torch.ones(size // 4 // ranks * ranks, device=device)
    part = whole[: whole.numel() // ranks].clone()
    before, after = (world.rank - 1) % ranks, (world.rank + 1) % ranks
    gathered, received = torch.empty_like(whole), torch.empty_like(whole)

    def ring() -> None:
        messages = [dist.P2POp(dist.isend, whole, after), dist.P2POp(dist.irecv, received, before)]
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    # torch 2.13 renamed these and warns about the old names; older versions have only the old names.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    share = (ranks - 1) / ranks
    return {
        "all-reduce": (lambda: collectives.all_reduce(whole, world), lambda: dist.all_reduce(whole), 2 * share),
        "all-gather": (
            lambda: collectives.gather_along(part, world, 0),
            lambda: gather(gathered, part),
            share,
        ),
        "reduce-scatter": (
            lambda: collectives.scatter_sum(whole, world, 0),
            lambda: scatter(part, whole),
            share,
        ),
        "all-to-all": (
            lambda: collectives.all_to_all(whole.view(ranks, -1), world),
            lambda: dist.all_to_all_single(received, whole),
            share,
        ),
        "ring shift": (lambda: collectives.start_shift(whole, world).wait(), ring, 1.0),
    }


def in_turns(runs: Sequence[Run], rounds: int, device: Any) -> list[float]:
    """Returns the median seconds of each run over `rounds`. A first call, which is not timed, connects the ranks."""
    import torch

    times: list[list[float]] = [[] for _ in runs]
    for round_ in range(-1, rounds):
        for run, into in zip(runs, times, strict=True):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            started = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if round_ >= 0:
                into.append(time.perf_counter() - started)
    return [statistics.median(each) for each in times]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
