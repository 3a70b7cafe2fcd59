"""Store: the parts of a sharded buffer cover every element once, run by run, as each Division says."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from megatron.data_parallel.buckets import Bucket, GradientSlot, make_buckets
from megatron.distributed.parallel_state import Axis
from megatron.state.store import FlatRun, are_masters

ALIGNED = 64


def slots_of(draw: random.Random, dp: Axis) -> Iterator[GradientSlot]:
    for number in range(draw.randint(1, 6)):
        shape = [(draw.randint(1, 40), draw.randint(1, 9)), (draw.randint(1, 200),)][draw.randint(0, 1)]
        parameter = nn.Parameter(torch.rand(shape))
        yield GradientSlot(f"p{number}", parameter, dp, Axis.single("replicate"), torch.float32, shown=True)


def one_bucket(seed: int, rank: int, ranks: int) -> tuple[Bucket, list[GradientSlot]]:
    dp = Axis("dp", rank, ranks, tuple(range(ranks)))
    slots = list(slots_of(random.Random(seed), dp))
    (bucket,) = make_buckets(slots, size=10**9, divided=True)
    return bucket, slots


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("seed", range(8))
def test_the_runs_of_all_ranks_are_every_element_once(seed: int, ranks: int) -> None:
    torch.manual_seed(seed)
    _, wanted = one_bucket(seed, 0, ranks)
    whole = {slot.name: slot.parameter.detach().clone().view(-1) for slot in wanted}
    found: dict[str, list[Tensor]] = {name: [] for name in whole}
    for rank in range(ranks):
        torch.manual_seed(seed)
        bucket, slots = one_bucket(seed, rank, ranks)
        run = bucket.run
        assert run.names == tuple(slot.name for slot in slots) and run.weights.numel() == run.grads.numel()
        for slot, (name, place) in zip(slots, run.places(), strict=True):
            assert slot.division is not None and name == slot.name
            start, stop = slot.division.held
            assert torch.equal(run.weights[place], whole[name][start:stop]), "the Division and the run say the same"
            found[name].append(run.weights[place])
    assert all(torch.equal(torch.cat(parts), whole[name]) for name, parts in found.items())


@pytest.mark.parametrize("ranks", [2, 5])
def test_the_chunks_are_equal_and_aligned_and_hold_the_padding(ranks: int) -> None:
    for seed in range(8):
        buckets = [one_bucket(seed, rank, ranks)[0] for rank in range(ranks)]
        (share,) = {bucket.chunk[1] - bucket.chunk[0] for bucket in buckets}
        assert share % ALIGNED == 0 and buckets[0].buffer.numel() == share * ranks
        counted = sum(bucket.own.numel() for bucket in buckets)
        assert counted == sum(parameter.numel() for parameter in buckets[0].parameters.values())


def test_a_parameter_stays_itself_when_its_weights_are_flat() -> None:
    torch.manual_seed(0)
    bucket, slots = one_bucket(1, 0, 2)
    flat = bucket.flatten_weights()
    flat.fill_(7.0)
    assert all(bool((slot.parameter == 7.0).all()) for slot in slots)
    assert bucket.flatten_weights() is flat


def test_masters_are_what_is_wider_than_the_model() -> None:
    class Named:
        def __init__(self, dtype: torch.dtype) -> None:
            self.dtype = dtype

        def parameter(self, _: str) -> nn.Parameter:
            return nn.Parameter(torch.zeros(1, dtype=self.dtype))

    for model, weights, masters in (("bfloat16", "float32", True), ("float32", "float32", False)):
        run = FlatRun(("w",), (1,), torch.zeros(1), torch.zeros(1, dtype=getattr(torch, weights)))
        assert are_masters(Named(getattr(torch, model)), run) is masters  # type: ignore[arg-type]
