"""FairScale's pair for a model of your own: optimizer state and gradients are divided over the ranks.

    python examples/sharded_optimizer.py
    torchrun --standalone --nproc_per_node 2 examples/sharded_optimizer.py

First OSS, from the parameters and an optimizer's class; then ShardedDataParallel, from the model and the OSS. Each
parameter has an owner: its gradient is reduced there, the owner updates it and gives it to the others.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that is not installed

from megatron.compat import OSS, ShardedDataParallel

BATCH = 16


def open_process_group() -> None:
    """Opens the process group of the ranks that torchrun has started, or of this process alone."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save", type=Path, help="file for the model's weights and the whole optimizer state")
    arguments = parser.parse_args()
    open_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = (
        torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
    )

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 64), nn.GELU(), nn.Linear(64, 10)).to(device)
    optimizer = OSS(model.parameters(), optim=torch.optim.AdamW, lr=0.01)
    sharded = ShardedDataParallel(model, optimizer)
    for step in range(arguments.steps):
        x = torch.randn(BATCH, 10, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank].to(device)
        optimizer.zero_grad()
        loss = F.mse_loss(sharded(x), x.flip(-1).tanh())
        loss.backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step}: loss {mean.item() / ranks:.5f}", flush=True)
    if arguments.save is not None:
        optimizer.consolidate_state_dict(recipient_rank=0)  # all ranks: the state of all comes to the first
        if rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, arguments.save)
    dist.barrier()  # no rank leaves while another still needs it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
