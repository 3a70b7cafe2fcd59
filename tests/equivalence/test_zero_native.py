"""Native AdamW on ZeRO 2 and 3 shards against torch's AdamW on whole fp64 tensors, with the same gradients.

Three ranks split rows unevenly; some have no part of a parameter. torch.nn.utils.clip_grad_norm_ gives the reference
for clipping. The state converts to the update by torch's operations and back, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.data_parallel import FullySharded, fully_sharded
from megatron.optimizer import Optimizer
from megatron.optimizer import adam_flat as flat
from megatron.optimizer.adam_flat import FlatAdam
from megatron.optimizer.update_rules import TorchUpdate
from tests.helpers.distributed import run_ranks
from tests.helpers.kernels import backend
from tests.helpers.layouts import whole_state
from tests.helpers.runs import flags, make_parts

WORLD, STEPS, LR, DECAY = 3, 5, 1e-2, 0.1
# A padded vocabulary has rows whose gradients no norm counts.
BATCH = {"vocab_size": 96, "micro_batch_size": 1, "global_batch_size": 3, "clip_grad": 0.5}
CASES = [{"zero_stage": 2}, {"zero_stage": 3, "bf16": True}]
Plant = Callable[[pytest.MonkeyPatch], None]


def made(rank: int, kernels: str, **settings: Any) -> Any:
    return make_parts(flags(**BATCH, **settings, kernels=kernels), rank=rank, world_size=WORLD)[1]


def gradient(name: str, like: Tensor, step: int) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(1000 * step + len(name)))


class Peer:
    """torch's AdamW on whole tensors."""

    def __init__(self, grads: FullySharded) -> None:
        self.weights = {name: nn.Parameter(grads.whole_of(name, grads.weight(name)).double()) for name in grads.names}
        groups = [{"params": [p], "weight_decay": DECAY if p.dim() > 1 else 0.0} for p in self.weights.values()]
        self.rule = torch.optim.AdamW(groups, lr=LR, foreach=False)

    def step(self, number: int) -> None:
        for name, weight in self.weights.items():
            weight.grad = gradient(name, weight, number).double()
        nn.utils.clip_grad_norm_(self.weights.values(), BATCH["clip_grad"])
        self.rule.step()

    def distance(self, grads: FullySharded, optimizer: Optimizer) -> float:
        state, worst = whole_state(optimizer), 0.0
        for name, weight in self.weights.items():
            kept = {"exp_avg": self.rule.state[weight]["exp_avg"], "exp_avg_sq": self.rule.state[weight]["exp_avg_sq"]}
            ours = {kind: state[name][kind] for kind in kept} | {"w": grads.whole_of(name, grads.weight(name))}
            theirs = {**kept, "w": weight.detach()}
            worst = max(worst, *(((ours[k].double() - theirs[k]).norm() / theirs[k].norm()).item() for k in ours))
        return worst


def step(grads: FullySharded, optimizer: Optimizer, number: int) -> None:
    grads.zero()
    for name in grads.names:
        grads.grad(name).copy_(grads.part_of(name, gradient(name, grads.parameter(name), number)))
    grads.reduce()
    optimizer.step(LR, DECAY)


def train(rank: int, settings: dict[str, Any], plant: Plant | None) -> float:
    """Distance to torch's AdamW, after the state has passed through the other update."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch, made(rank, "auto,-adamw", **settings) as portable:
        if plant is not None:
            plant(patch)
        with made(rank, "auto", **settings) as parts:
            grads, optimizer, other = parts.engine.divided, parts.engine.optimizer, portable.engine.optimizer
            assert isinstance(optimizer._update, FlatAdam) and isinstance(other._update, TorchUpdate)
            peer = Peer(grads)
            for number in range(STEPS):
                peer.step(number)
                step(grads, optimizer, number)
            there = copy.deepcopy(optimizer.state())
            for name in grads.names:
                portable.engine.divided.weight(name).detach().copy_(grads.weight(name))
            other.load_state(there, optimizer.extra_state())
            step(portable.engine.divided, other, STEPS)
            optimizer.load_state(other.state(), other.extra_state())
            for name in grads.names:
                assert ("master" in there[name]) is ("bf16" in settings)
                if "bf16" not in settings:
                    grads.weight(name).detach().copy_(portable.engine.divided.weight(name))
            for number in (STEPS, STEPS + 1):
                peer.step(number)
            step(grads, optimizer, STEPS + 1)
            return peer.distance(grads, optimizer)


def test_equals_torchs_adamw() -> None:
    backend("cpu")
    for settings in CASES:
        found = run_ranks(WORLD, train, settings, None)
        assert max(found) < 2e-6, (settings, found)


def no_factor(patch: pytest.MonkeyPatch) -> None:
    """Planted bug: gradients are neither unscaled nor clipped."""
    control = flat.step_control

    def plain(decision: Any, *rest: Any) -> Tensor:
        return control(decision, *rest).index_fill(0, torch.tensor([1]), 1.0)

    patch.setattr(flat, "step_control", plain)


def a_copy_of_the_shard(patch: pytest.MonkeyPatch) -> None:
    alone = fully_sharded.run_alone

    def copied(grads: Any, name: str) -> Any:
        piece = alone(grads, name)
        return type(piece)(piece.names, piece.ends, piece.grads, piece.weights.clone())

    patch.setattr(fully_sharded, "run_alone", copied)


def no_masters(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(flat, "are_masters", lambda grads, pieces: False)


@pytest.mark.parametrize("plant", [no_factor, a_copy_of_the_shard])
def test_planted_mistakes_are_seen(plant: Plant) -> None:
    assert max(run_ranks(WORLD, train, CASES[1], plant)) > 1e-3


def test_a_state_without_masters_is_seen() -> None:
    with pytest.raises(AssertionError, match="master"):
        run_ranks(WORLD, train, CASES[1], no_masters)
