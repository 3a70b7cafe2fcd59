"""Parallel axes of one rank, as a value that is passed explicitly."""

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from megatron.distributed.comm_log import CommLog, CommOp
from megatron.layout import AXES, Layout
from megatron.state.division import Members

GroupMaker = Callable[[str, tuple[int, ...]], dist.ProcessGroup]
Partition = tuple[tuple[int, ...], ...]
Partitions = Mapping[str, Partition]
"""Groups of each axis."""
OWN = ("cp", "ep")
"""Axes whose ring shifts and all-to-alls are in flight together with gradient reductions."""
LinkEnd = tuple[str, bool]
"""Content of a link ("activation" or "gradient"), and True if this rank is the sender."""


@dataclass(frozen=True)
class Axis:
    """Process group of this rank: the rank's number within the group, and the members.

    torch owns the process group until `destroy_process_group`; an axis has only a weak reference. A group that outlives
    that call still has running threads when the interpreter exits, and one such exit in twenty aborts.
    """

    name: str
    rank: int
    size: int
    ranks: tuple[int, ...]
    _group: dist.ProcessGroup | weakref.ref[dist.ProcessGroup] | None = field(default=None, repr=False)
    comm_log: CommLog | None = field(default=None, repr=False, compare=False)
    """Log of the collectives on this axis, for diagnosis."""

    def __post_init__(self) -> None:
        if self._group is not None and not isinstance(self._group, weakref.ref):
            object.__setattr__(self, "_group", weakref.ref(self._group))

    @staticmethod
    def single(name: str, rank: int = 0) -> "Axis":
        """Axis of size 1, which never communicates; `rank` is the global number of its only member."""
        return Axis(name, 0, 1, (rank,))

    @property
    def members(self) -> Members:
        """Ranks as a value, without the process group."""
        return Members(f"{self.name} of rank {self.ranks[0]}", self.rank, self.size)

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group for a collective. Raises if there is none: to torch, None would mean the whole world."""
        if self._group is None:
            raise RuntimeError(f"the {self.name} axis of size {self.size} has no process group")
        assert isinstance(self._group, weakref.ref)
        group = self._group()
        if group is None:
            raise RuntimeError(f"the process group of the {self.name} axis was destroyed")
        return group

    def begin(self, name: str, shape: tuple[int, ...] | None = None) -> CommOp:
        """Logs the start of a collective. `shape`: given if all members have the same."""
        if self.comm_log is None:
            return CommOp(name, self.name, self.ranks)
        return self.comm_log.began(name, self.name, self.ranks, shape)

    def wait(self, operation: CommOp) -> AbstractContextManager[None]:
        """Wraps a call that blocks until the other members have joined."""
        return nullcontext() if self.comm_log is None else self.comm_log.wait(operation)

    def during(self, name: str, shape: tuple[int, ...] | None = None) -> AbstractContextManager[None]:
        """Wraps a blocking collective."""
        return self.wait(self.begin(name, shape))


@dataclass(frozen=True)
class ParallelState:
    """All axes of one rank in one layout. Several states may exist in one process."""

    layout: Layout
    rank: int
    tp: Axis
    cp: Axis
    ep: Axis
    dp: Axis
    pp: Axis
    dp_cp: Axis
    expert_dp: Axis
    shard: Axis
    expert_shard: Axis
    replicate: Axis
    embedding: Axis
    model: Axis
    world: Axis
    pp_links: Mapping[LinkEnd, Axis] = field(default_factory=dict)
    """This rank's ends of the links between pipeline stages, for backends that match messages only by order (nccl). A
    link is a process group of two ranks, of which one only sends and the other only receives."""
    comm_log: CommLog = field(default_factory=CommLog, repr=False, compare=False)

    @staticmethod
    def build(
        layout: Layout,
        rank: int,
        timeout: timedelta | None = None,
        make_group: GroupMaker | None = None,
        *,
        links: bool | None = None,
    ) -> "ParallelState":
        """Makes the groups of `layout`. A collective call of the whole world.

        `timeout` applies to every collective (torch does not inherit the world's). `links`: make `pp_links`; default:
        only if the backend needs them.
        """
        make = make_group or partial(_new_group, timeout=timeout)
        partitions = {name: layout.groups(name) for name in AXES}
        groups = _make_groups(partitions, rank, make)
        comm_log = CommLog()
        axes = {
            axis.name: replace(axis, _group=groups.get(axis.name), comm_log=comm_log)
            for axis in _axes(partitions, rank)
        }
        if links is None:
            links = layout.pp > 1 and dist.is_initialized() and dist.get_backend() != "gloo"
        pp_links = _build_links(layout, rank, make) if links else {}
        return ParallelState(layout, rank, pp_links=pp_links, comm_log=comm_log, **axes)

    @staticmethod
    def plan(layout: Layout, rank: int) -> "ParallelState":
        """Builds the same axes without process groups, for arithmetic: a collective over one of them raises."""
        axes = _axes({name: (layout.group_of(name, rank),) for name in AXES}, rank)
        return ParallelState(layout, rank, **{axis.name: axis for axis in axes})  # type: ignore[arg-type]

    def axis(self, name: str) -> Axis:
        if name not in AXES:
            raise ValueError(f"unknown axis {name!r}; the axes are {', '.join(AXES)}")
        axis: Axis = getattr(self, name)
        return axis


def _axes(partitions: Partitions, rank: int) -> list[Axis]:
    """Axes of a rank, without process groups."""
    members = {name: _own(partition, rank) for name, partition in partitions.items()}
    return [Axis(name, ranks.index(rank), len(ranks), ranks) for name, ranks in members.items()]


def _make_groups(partitions: Partitions, rank: int, make: GroupMaker) -> dict[str, dist.ProcessGroup]:
    """Groups of this rank, by axis. Every rank calls `make` once per axis, for its own group (even a group of one), and
    these calls together make all groups of the axis.

    Axes with equal groups share a communicator, which runs its operations one by one. Axes in OWN have their own.
    """
    made: dict[tuple[str, Partition], dist.ProcessGroup] = {}
    groups = {}
    for name in ("world", *partitions):
        partition = partitions[name]
        if all(len(ranks) == 1 for ranks in partition):
            continue
        key = (name if name in OWN else "", partition)
        if key not in made:
            made[key] = make(name, _own(partition, rank))
        groups[name] = made[key]
    return groups


def _build_links(layout: Layout, rank: int, make: GroupMaker) -> dict[LinkEnd, Axis]:
    """Links of this rank between pipeline stages, in the order in which all ranks make them."""
    links: dict[LinkEnd, Axis] = {}
    for what, receiver_of in layout.pipeline_links():
        sender = next((sender for sender, receiver in receiver_of.items() if rank in (sender, receiver)), None)
        if sender is None:
            make(f"pp {what}", (rank,))
            continue
        ends = tuple(sorted((sender, receiver_of[sender])))
        links[what, rank == sender] = Axis(f"pp {what}", ends.index(rank), 2, ends, make(f"pp {what}", ends))
    return links


def _own(partition: Partition, rank: int) -> tuple[int, ...]:
    return next(ranks for ranks in partition if rank in ranks)


def _new_group(name: str, ranks: tuple[int, ...], timeout: timedelta | None) -> dist.ProcessGroup:
    """Makes a group. Only its members call this, so that all groups of an axis are made at the same time; nccl splits
    the world once for all of them. In torch, a group's name contains the number of groups that the rank has made, so
    all ranks must make equally many."""
    if not dist.is_initialized():
        raise RuntimeError(f"the {name} axis has {len(ranks)} ranks, but no process group was initialised")
    if name == "world" and dist.group.WORLD is not None:
        return dist.group.WORLD
    return dist.new_group(
        list(ranks), timeout=timeout, backend=_part_backend(), use_local_synchronization=True, group_desc=name
    )


def _part_backend() -> str | None:
    """Backend of groups below the world: on an accelerator, only the accelerator's backend. The number of gloo's
    connections would grow with the group, and the few plain values of these groups can go through the accelerator."""
    of_device = dict(part.split(":") for part in dist.get_backend_config().split(","))
    host = of_device.pop("cpu", None)
    others = [f"{device}:{backend}" for device, backend in of_device.items() if backend != host]
    return ",".join(others) if host == "gloo" and others else None
