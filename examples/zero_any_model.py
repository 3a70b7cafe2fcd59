"""ZeRO for a model of your own: DeepSpeed's calls, with the engine of this framework underneath.

    python examples/zero_any_model.py
    torchrun --standalone --nproc_per_node 2 examples/zero_any_model.py --stage 2

The losses of one process and of several are the same to the last digits that fp32 has: every rank takes its part of
one batch. `--fp16` trains in half precision with fp32 masters and a dynamic loss scale.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that is not installed

from megatron.compat import initialize

BATCH, MICRO_BATCH = 16, 4


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """The whole batch of a step; each rank takes its part."""
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 10, generator=draw)
    return x, x.flip(-1).tanh()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=0, help="of ZeRO")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--fp16", action="store_true")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 64), nn.GELU(), nn.Linear(64, 10))
    engine, _, _, scheduler = initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps),
        config={
            "train_batch_size": BATCH,  # = micro-batch x accumulation x ranks: the accumulation follows
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "zero_optimization": {"stage": arguments.stage},
            "fp16": {"enabled": arguments.fp16},
            "gradient_clipping": 1.0,
        },
    )
    for step in range(arguments.steps):
        x, y = batch_of(step)
        mine = slice(
            engine.global_rank * BATCH // engine.world_size, (engine.global_rank + 1) * BATCH // engine.world_size
        )
        losses = []
        for inputs, targets in zip(x[mine].split(MICRO_BATCH), y[mine].split(MICRO_BATCH), strict=True):
            loss = F.mse_loss(engine(inputs), targets.to(engine.device))  # inputs are moved and cast by the engine
            engine.backward(loss)
            engine.step()  # updates with the last micro-batch of a step
            losses.append(loss.detach())
        mean = torch.stack(losses).float().mean()
        if engine.world_size > 1:
            torch.distributed.all_reduce(mean)
        if engine.global_rank == 0:
            print(f"step {step}: loss {mean.item() / engine.world_size:.5f}, rate {scheduler.get_last_lr()[0]:.5f}")


if __name__ == "__main__":
    main()
