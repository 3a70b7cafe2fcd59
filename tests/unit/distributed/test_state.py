"""The axes as values, and collectives on one rank."""

from __future__ import annotations

import pytest
import torch

from megatron.distributed import collectives, messages
from megatron.distributed.state import Axis, ParallelState
from megatron.layout import AXES, Layout


class FakeGroup:
    """Stands for a process group."""


def test_one_process_needs_no_process_group() -> None:
    state = ParallelState.build(Layout(1), 0)
    for name in AXES:
        axis = state.axis(name)
        assert (axis.name, axis.rank, axis.size, axis.ranks) == (name, 0, 1, (0,))
        with pytest.raises(RuntimeError, match=f"{name} axis of size 1 has no process group"):
            _ = axis.group


def test_a_plan_has_places_but_no_groups() -> None:
    layout = Layout(8, tp=2, pp=2)
    for rank in range(8):
        state, place = ParallelState.plan(layout, rank), layout.coordinates(rank)
        assert (state.tp.rank, state.dp.rank, state.pp.rank) == (place.tp, place.dp, place.pp)
        assert (state.tp.size, state.dp.size, state.pp.size, state.cp.size) == (2, 2, 2, 1)
        assert state.dp.ranks[state.dp.rank] == rank == state.world.rank


def test_build_without_a_world_raises() -> None:
    with pytest.raises(RuntimeError, match=r"tp axis has 2 ranks"):
        ParallelState.build(Layout(2, tp=2), 0)


def test_every_group_is_made_once_on_every_rank_in_one_order() -> None:
    """Making a group is a collective call: ranks that disagree on the order hang."""
    orders = []
    for rank in range(8):
        made: dict[tuple[int, ...], FakeGroup] = {}

        def make(name: str, ranks: tuple[int, ...], made: dict[tuple[int, ...], FakeGroup] = made) -> FakeGroup:
            assert ranks not in made
            return made.setdefault(ranks, FakeGroup())

        state = ParallelState.build(Layout(8, tp=2, pp=2, ep=2), rank, make_group=make)  # type: ignore[arg-type]
        for name in AXES:
            axis = state.axis(name)
            assert axis.size == 1 or axis.group is made[axis.ranks]
        orders.append(list(made))
    assert all(order == orders[0] for order in orders)


def test_an_axis_does_not_keep_its_group_alive() -> None:
    """Or `destroy_process_group` leaves its threads running until the interpreter ends, which may abort."""
    group = FakeGroup()
    axis = Axis("dp", 0, 2, (0, 1), group)  # type: ignore[arg-type]
    assert axis.group is group
    del group
    with pytest.raises(RuntimeError, match="process group of the dp axis was destroyed"):
        _ = axis.group


@pytest.mark.parametrize(
    "call",
    [
        lambda axis: collectives.all_reduce(torch.ones(1), axis),
        lambda axis: collectives.start_all_reduce(torch.ones(1), axis),
        lambda axis: collectives.broadcast(torch.ones(1), axis),
        lambda axis: collectives.all_gather(torch.ones(1), axis),
        lambda axis: messages.all_gather_json(1, axis, int),
        lambda axis: messages.broadcast_json(1, axis, int),
        collectives.barrier,
    ],
)
def test_a_missing_group_raises(call: object) -> None:
    with pytest.raises(RuntimeError, match="dp axis of size 2 has no process group"):
        call(Axis("dp", 0, 2, (0, 1)))  # type: ignore[operator]


def test_size_one_never_touches_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "dist", None)
    monkeypatch.setattr(messages, "dist", None)
    axis, tensor = Axis.single("dp"), torch.tensor([1.0, 2.0])
    assert collectives.all_reduce(tensor, axis, "max") is tensor
    assert collectives.start_all_reduce(tensor, axis).wait() is tensor
    assert collectives.broadcast(tensor, axis) is tensor
    assert collectives.all_gather(tensor, axis)[0] is tensor
    assert messages.all_gather_json({"a": 1}, axis, dict[str, int]) == [{"a": 1}]
    assert messages.broadcast_json("x", axis, str) == "x"
    collectives.barrier(axis)
    assert tensor.tolist() == [1.0, 2.0]


def test_unknown_axis() -> None:
    with pytest.raises(ValueError, match="unknown axis 'layout'"):
        ParallelState.plan(Layout(1), 0).axis("layout")
