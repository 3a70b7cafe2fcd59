"""Weights that are gathered during the next forward pass have arrived when they are used, by any kind of use."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from megatron.config.sections.optimizer import OptimizerConfig
from megatron.config.sections.precision import PrecisionConfig
from megatron.data_parallel import BucketStore
from megatron.data_parallel.late_gather import LateGather, repeated_units
from megatron.distributed import collectives
from megatron.distributed.parallel_state import ParallelState
from megatron.layout import Layout
from megatron.optimizer import Optimizer
from tests.helpers.distributed import run_ranks

WIDTH, STEPS = 12, 4


class Chain(nn.Module):
    """Has parameters before and after the layers, and uses one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.before
        for layer in (*self.layers, self.layers[0]):
            x = torch.tanh(layer(x))
        return self.after(x)


class Backwards(Chain):
    """Uses first what is registered last."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.after(x))


def train(rank: int, kind: type[Chain], late: bool) -> dict[str, Tensor] | str:
    torch.manual_seed(0)
    model = kind()
    state = ParallelState.build(Layout(2), rank)
    grads = BucketStore(
        model.named_parameters(),
        state.dp,
        bucket_size=40,
        overlap=True,
        divided=True,
        late_gather=model if late else None,
    )
    optimizer = Optimizer(grads, OptimizerConfig(clip_grad=0.0), PrecisionConfig())
    for step in range(STEPS):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2 * step + rank))
        grads.zero()
        grads.arm()
        try:
            model(x).square().sum().backward()
        except Exception as error:
            return str(error)
        grads.reduce()
        optimizer.step(0.1, 0.01)
    assert any(bucket.gathering is not None for bucket in grads._buckets) == late
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_a_chain_is_waited_for_part_by_part() -> None:
    early, late = (run_ranks(2, train, Chain, how)[0] for how in (False, True))
    assert all(torch.equal(early[name], late[name]) for name in early)


def test_another_order_is_refused_and_not_computed_with_old_weights() -> None:
    for message in run_ranks(2, train, Backwards, True):
        assert "--overlap-param-gather: the model uses after.weight before" in message, message


def test_planted_weights_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateGather, "_wait_for", lambda self, buckets: lambda *_: None)
    assert all("the model uses before before" in message for message in run_ranks(2, train, Chain, True))


def test_planted_weights_that_arrive_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: a wait that does not wait, so that old weights change the result."""
    wanted = run_ranks(2, train, Chain, False)[0]
    start = collectives.start_gather_in_place

    def never(flat: Tensor, axis: collectives.Axis) -> collectives.Pending:
        start(flat.clone(), axis).wait()
        return collectives.Pending(partial(torch.clone, flat))

    monkeypatch.setattr(collectives, "start_gather_in_place", never)
    found = run_ranks(2, train, Chain, True)[0]
    assert any(not torch.equal(wanted[name], found[name]) for name in wanted)


def test_units_are_the_outermost_entries_of_lists() -> None:
    inner = nn.Sequential(nn.Linear(1, 1), nn.ModuleList([nn.Linear(1, 1)]))
    model = nn.ModuleDict({"list": nn.ModuleList([inner, nn.Linear(1, 1)]), "alone": nn.Linear(1, 1)})
    assert list(repeated_units(model)) == [inner, model["list"][1], model["alone"]]
    assert list(repeated_units(nn.Linear(1, 1))) == []
