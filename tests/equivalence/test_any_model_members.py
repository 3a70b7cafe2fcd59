"""DeepSpeed's explicit accumulation boundaries, and its calls for whole weights when ranks shard them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.compat import initialize
from megatron.errors import ConfigError
from tests.helpers.any_model import largest_difference
from tests.helpers.distributed import run_ranks

GATE = 1e-12
GROUPS = [[0, 1, 2], [3], [4, 5]]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def loss_of(model: nn.Module, seed: int, rank: int, ranks: int) -> Tensor:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).chunk(ranks)[rank]
    loss: Tensor = F.mse_loss(model(x), x.flip(-1))
    return loss


def own_boundaries(rank: int, ranks: int, stage: int, folder: str) -> tuple[dict[str, Tensor], list[str]]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    config = {"train_batch_size": 4, "zero_optimization": {"stage": stage}}
    engine = initialize(model=model, optimizer=optimizer, config=config)[0]
    for group in GROUPS:
        for seed in group:
            engine.set_gradient_accumulation_boundary(seed == group[-1])
            engine.backward(loss_of(engine, seed, rank, ranks) / len(group), scale_wrt_gas=False)
        engine.step()
    assert engine.save_16bit_model(folder)
    said = []
    for call in (engine.module_state_dict, engine.compile):
        if stage > 1:
            with pytest.raises(ConfigError) as error:
                call()
            said.append(str(error.value))
    return torch.load(Path(folder) / "pytorch_model.bin", weights_only=True) if rank == 0 else {}, said


def each_stage(rank: int, ranks: int, folder: str) -> list[tuple[dict[str, Tensor], list[str]]]:
    return [own_boundaries(rank, ranks, stage, f"{folder}/{stage}") for stage in (1, 2, 3)]


def test_boundaries_of_ones_own_equal_a_plain_loop(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for group in GROUPS:
        optimizer.zero_grad()
        for seed in group:
            (loss_of(model, seed, 0, 1) / len(group)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    first, second = run_ranks(2, each_stage, 2, str(tmp_path))
    for stage, (found, said), (_, also) in zip((1, 2, 3), first, second, strict=True):
        assert largest_difference(found, dict(model.state_dict())) < GATE
        assert said == also and len(said) == 2 * (stage > 1)
        if said:
            assert "call engine.whole_state_dict() on all ranks" in said[0] and f"stage {stage} of ZeRO" in said[1]
