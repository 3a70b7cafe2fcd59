"""Compares the step time of the engine for any model with a plain DistributedDataParallel loop.

    python benchmarks/engine.py                     # the model of the ZeRO article, two ranks on the CPU
    python benchmarks/engine.py --width 512 --layers 8 --batch 64

Both train the same model with torch.optim.AdamW in the same processes and take turns. A ratio compares successive
times; above 1 the engine is faster.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that is not installed

from megatron.compat import initialize

Step = Callable[[Tensor, Tensor], None]


def make_model(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def plain_loop(model: nn.Module) -> Step:
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(wrapped(x), y).backward()
        optimizer.step()

    return step


def engine_loop(model: nn.Module, batch: int, stage: int, ranks: int) -> Step:
    engine, *_ = initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        config={"train_batch_size": batch * ranks, "zero_optimization": {"stage": stage}},
    )

    def step(x: Tensor, y: Tensor) -> None:
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()

    return step


def seconds(step: Step, x: Tensor, y: Tensor, steps: int) -> float:
    dist.barrier()
    started = time.perf_counter()
    for _ in range(steps):
        step(x, y)
    dist.barrier()
    return (time.perf_counter() - started) / steps


def measure(rank: int, arguments: argparse.Namespace, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=arguments.ranks)
    draw = torch.Generator().manual_seed(rank)
    x, y = (torch.randn(arguments.batch, arguments.width, generator=draw) for _ in range(2))
    loops = {
        "torch DDP": plain_loop(make_model(arguments.width, arguments.layers)),
        "engine": engine_loop(
            make_model(arguments.width, arguments.layers), arguments.batch, arguments.stage, arguments.ranks
        ),
    }
    for step in loops.values():
        seconds(step, x, y, arguments.steps)  # warm-up: the first steps allocate
    ratios = []
    for number in range(arguments.rounds):
        order = list(loops) if number % 2 == 0 else list(reversed(loops))
        times = {name: seconds(loops[name], x, y, arguments.steps) for name in order}
        ratios.append(times["torch DDP"] / times["engine"])
        if rank == 0:
            print(
                "  ".join(f"{name} {1e6 * times[name]:.0f} us" for name in loops) + f"  ratio {ratios[-1]:.2f}",
                flush=True,
            )
    if rank == 0:
        print(f"ratio: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=10)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4, help="samples per rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=0, help="stage of ZeRO, for the engine")
    parser.add_argument("--steps", type=int, default=300, help="steps per turn")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (arguments, str(Path(folder) / "meeting")), arguments.ranks)


if __name__ == "__main__":
    main()
