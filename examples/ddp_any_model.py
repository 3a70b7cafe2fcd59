"""Plain data parallelism for a model of your own: gradients are averaged over the ranks.

    python examples/ddp_any_model.py                  # starts two processes itself, with mp.spawn
    python examples/ddp_any_model.py --ranks 1
    torchrun --standalone --nproc_per_node 2 examples/ddp_any_model.py

The images are made up in the shape of MNIST: a class is a bright square in one of ten places. Replace `Squares` with
`torchvision.datasets.MNIST(...)` for the true ones. Replace the import of DistributedDataParallel with torch's and the
losses stay the same.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that is not installed

from megatron.compat import DistributedDataParallel

SAMPLES, BATCH = 512, 64


class Squares(Dataset[tuple[Tensor, int]]):
    """28 x 28 images of ten classes, with noise."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        label = number % 10
        image = torch.randn(1, 28, 28, generator=torch.Generator().manual_seed(number))
        row, column = divmod(label, 5)
        image[:, 4 + 12 * row : 10 + 12 * row, 5 * column : 5 * column + 5] += 2.0
        return image, label


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.out = nn.Linear(8 * 7 * 7, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.out(F.max_pool2d(F.relu(self.norm(self.conv(images))), 4).flatten(1))


def train(epochs: int) -> None:
    """Trains the model; a process group must exist."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    torch.manual_seed(rank)  # the first rank's model is everybody's: DistributedDataParallel sends it
    model = DistributedDataParallel(Net().to(device), device_ids=[device] if on_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = Squares()
    sampler = DistributedSampler(data, ranks, rank, seed=0)
    loader = DataLoader(data, BATCH // ranks, sampler=sampler, drop_last=True)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, device=device)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()  # afterwards every gradient is the mean over the ranks
            optimizer.step()
            total += torch.stack([loss.detach(), torch.ones_like(loss)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total[0].item() / total[1].item():.4f}", flush=True)


def spawned(rank: int, ranks: int, epochs: int, meeting: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    train(epochs)
    dist.barrier()  # no rank leaves while another still needs it
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes to start, without torchrun")
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    if dist.is_torchelastic_launched():  # by torchrun
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        train(arguments.epochs)
        dist.barrier()  # no rank leaves while another still needs it
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            spawned, (arguments.ranks, arguments.epochs, str(Path(folder) / "meeting")), arguments.ranks
        )


if __name__ == "__main__":
    main()
