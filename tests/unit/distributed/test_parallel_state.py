"""The axes as values, and collectives on one rank."""

from __future__ import annotations

import pytest
import torch

from megatron.distributed import collectives, messages
from megatron.distributed import parallel_state as state_module
from megatron.distributed.parallel_state import Axis, ParallelState
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
    with pytest.raises(RuntimeError, match=r"world axis has 2 ranks"):
        ParallelState.build(Layout(2, tp=2), 0)


def made_by(layout: Layout, rank: int, links: bool = False) -> tuple[ParallelState, list[tuple[str, tuple[int, ...]]]]:
    """State of a rank, and the groups that it asks for, in order."""
    asked: list[tuple[str, tuple[int, ...]]] = []
    kept: list[FakeGroup] = []

    def make(name: str, ranks: tuple[int, ...]) -> FakeGroup:
        asked.append((name, ranks))
        kept.append(FakeGroup())
        return kept[-1]

    state = ParallelState.build(layout, rank, make_group=make, links=links)  # type: ignore[arg-type]
    state.comm_log.kept = kept  # type: ignore[attr-defined]  # an axis does not keep its group alive
    return state, asked


LAYOUTS = [
    *(Layout(8, tp=2, pp=2, ep=2), Layout(12, pp=3, cp=2, ep=2), Layout(12, tp=2, pp=6), Layout(8, cp=8, ep=8)),
    *(Layout(8, tp=2, instances=2), Layout(8, cp=2, ep=2, instances=2), Layout(8, cp=8, instances=4)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_one_call_of_all_ranks_makes_all_groups_of_an_axis(layout: Layout) -> None:
    """Making groups is a collective call: each rank names only its own group, so the groups of one call must partition
    the world."""
    ranks = range(layout.world_size)
    asked = [made_by(layout, rank, links=layout.pp > 1)[1] for rank in ranks]
    assert len({len(calls) for calls in asked}) == 1
    for call in zip(*asked, strict=True):
        assert len({name for name, _ in call}) == 1
        for rank, (_, group) in enumerate(call):
            assert rank in group and all(call[member][1] == group for member in group)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_axis_has_the_group_of_its_ranks(layout: Layout) -> None:
    for rank in range(layout.world_size):
        state, asked = made_by(layout, rank, links=layout.pp > 1)
        assert asked[0] == ("world", tuple(range(layout.world_size)))
        for name in AXES:
            axis = state.axis(name)
            assert axis.ranks == layout.group_of(name, rank)
            if axis.size > 1:
                assert axis.group is not None
        assert len(state.pp_links) == (4 if layout.pp > 1 else 0)


def test_ring_shifts_and_all_to_alls_do_not_queue_behind_gradients() -> None:
    """Axes of the same ranks share a communicator, which runs one operation at a time; cp and ep have their own."""
    state, _ = made_by(Layout(8, cp=8, ep=8), 0)
    assert state.dp_cp.group is state.world.group
    groups = {state.cp.group, state.ep.group, state.dp_cp.group}
    assert len(groups) == 3 and state.cp.ranks == state.ep.ranks == state.dp_cp.ranks


def test_an_axis_does_not_keep_its_group_alive() -> None:
    """Otherwise `destroy_process_group` leaves its threads running until the interpreter exits, which may abort."""
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


@pytest.mark.parametrize(
    ("world", "parts"),
    [
        ("cpu:gloo,cuda:nccl", "cuda:nccl"),
        ("cpu:gloo,npu:hccl", "npu:hccl"),
        ("cpu:gloo", None),
        ("cpu:gloo,cuda:gloo", None),
        ("cuda:nccl", None),
    ],
)
def test_gloo_serves_the_world_alone(world: str, parts: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend of None stands for the world's own."""
    monkeypatch.setattr(state_module.dist, "get_backend_config", lambda: world)
    assert state_module._part_backend() == parts


@pytest.mark.parametrize(("config", "device"), [("cpu:gloo,cuda:nccl", "cpu"), ("cuda:nccl", "cuda:1")])
def test_values_go_over_the_host_where_the_group_can(config: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group = FakeGroup()
    monkeypatch.setattr(messages.dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    assert messages._device(Axis("dp", 0, 2, (0, 1), group)) == torch.device(device)  # type: ignore[arg-type]
