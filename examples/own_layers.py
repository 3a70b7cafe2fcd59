"""Tensor- and pipeline-parallel layers in a model of your own, without the rest of the framework.

    torchrun --standalone --nproc_per_node 4 examples/own_layers.py --tensor-parallel 2 --pipeline-parallel 2

Each layer is a residual MLP: a column-parallel linear, GELU, a row-parallel linear. The layers stand in an
nn.Sequential, which is cut into stages. Any layout prints the losses of one process (--tensor-parallel 1, no torchrun).
"""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that is not installed

from megatron.distributed.launch import LaunchInfo, shutdown
from megatron.distributed.parallel_state import Axis, ParallelState
from megatron.distributed.rendezvous import init_process_group
from megatron.layout import Layout
from megatron.pipeline_parallel.pipeline import Pipeline
from megatron.pipeline_parallel.sequential import cut_sequential, sequential_step
from megatron.pipeline_schedules import SCHEDULES
from megatron.tensor_parallel import ColumnParallelLinear, RowParallelLinear

WIDTH, LAYERS, MICRO_BATCHES, SAMPLES = 32, 4, 4, 8


class ResidualMLP(nn.Module):
    def __init__(self, number: int, tp: Axis) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(WIDTH, 4 * WIDTH, axis=tp)
        self.down = RowParallelLinear(4 * WIDTH, WIDTH, axis=tp)
        # The same weights in every layout: drawn whole, then each rank keeps its part.
        draw = torch.Generator().manual_seed(number)
        up, down = torch.randn(4 * WIDTH, WIDTH, generator=draw), torch.randn(WIDTH, 4 * WIDTH, generator=draw)
        with torch.no_grad():
            self.up.weight.copy_(up.chunk(tp.size, 0)[tp.rank] * 0.05)
            self.down.weight.copy_(down.chunk(tp.size, 1)[tp.rank] * 0.05)
            self.up.bias.zero_()
            self.down.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def loss_step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The summed loss of a batch, and how many elements it counts."""
    loss = (model(batch["x"]) - batch["y"]).square().sum()
    return loss, torch.tensor(batch["y"].numel())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_default_dtype(torch.float64)  # so that layouts can be compared to the last digits
    launch = LaunchInfo.detect()
    init_process_group(launch, "gloo", timedelta(minutes=10))
    layout = Layout(launch.world_size, tp=arguments.tensor_parallel, pp=arguments.pipeline_parallel)
    state = ParallelState.build(layout, launch.rank)

    model = nn.Sequential(*(ResidualMLP(number, state.tp) for number in range(LAYERS)))
    stages = nn.ModuleList(cut_sequential(model, state.pp))
    pipeline = Pipeline(
        list(stages),
        state.pp,
        SCHEDULES["1f1b"],
        loss_step=loss_step,
        hidden_step=sequential_step,
        hidden_like=lambda batch: ((SAMPLES, 1, WIDTH), batch["x"]),
    )
    optimizer = torch.optim.SGD(stages.parameters(), lr=0.5)
    draw = torch.Generator().manual_seed(0)
    for step in range(arguments.steps):
        x = torch.randn(MICRO_BATCHES, SAMPLES, 1, WIDTH, generator=draw)
        batches = [{"x": part, "y": part.flip(-1)} for part in x]
        optimizer.zero_grad()
        results = pipeline.forward_backward(batches, 1 / x.numel(), arm=lambda: None)
        optimizer.step()
        if results and state.tp.rank == 0 and state.dp.rank == 0:  # the last stage has the losses
            print(f"step {step}: loss {sum(loss.item() for loss, _ in results) / x.numel():.12f}", flush=True)
    shutdown()


if __name__ == "__main__":
    main()
