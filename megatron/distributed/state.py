"""The parallel axes of one rank, as a value that is passed explicitly."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from megatron.distributed.comm_log import CommLog, CommOp
from megatron.layout import AXES, Layout

GroupMaker = Callable[[str, tuple[int, ...]], dist.ProcessGroup]
LinkEnd = tuple[str, bool]
"""What a link carries ("activation" or "gradient"), and whether this rank is the sender."""


@dataclass(frozen=True)
class Axis:
    """One process group that this rank belongs to: its rank in it, and the members.

    The process group is torch's, which keeps it until `destroy_process_group`; an axis only points to it. A group
    that outlives that call still has running threads when the interpreter ends, and one such exit in twenty aborts.
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
    def single(name: str, rank: int = 0) -> Axis:
        """An axis of size 1, which never communicates; `rank` is the global number of its only member."""
        return Axis(name, 0, 1, (rank,))

    @property
    def group(self) -> dist.ProcessGroup:
        """The group for a collective. A missing one raises: to torch, None would mean the whole world."""
        if self._group is None:
            raise RuntimeError(f"the {self.name} axis of size {self.size} has no process group")
        assert isinstance(self._group, weakref.ref)
        group = self._group()
        if group is None:
            raise RuntimeError(f"the process group of the {self.name} axis was destroyed")
        return group

    def begin(self, name: str, shape: tuple[int, ...] | None = None) -> CommOp:
        """Logs the start of a collective; `shape` is given where all members have the same."""
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
    embedding: Axis
    model: Axis
    world: Axis
    pp_links: Mapping[LinkEnd, Axis] = field(default_factory=dict)
    """This rank's ends of the links between pipeline stages: process groups of two ranks, one of which only sends and
    the other only receives, where the backend matches messages by order only (nccl)."""
    comm_log: CommLog = field(default_factory=CommLog, repr=False, compare=False)

    @staticmethod
    def build(
        layout: Layout,
        rank: int,
        timeout: timedelta | None = None,
        make_group: GroupMaker | None = None,
        *,
        links: bool | None = None,
    ) -> ParallelState:
        """Makes the groups of `layout`. A collective call: every rank of the world makes it, in the same order.

        `timeout` is that of every collective (torch does not hand down the one the world was initialised with).
        `links` asks for `pp_links`; unset, where the backend needs them.
        """
        groups = _make_groups(layout, make_group or partial(_new_group, timeout=timeout))
        comm_log = CommLog()
        axes = {
            axis.name: replace(axis, _group=groups.get(axis.ranks), comm_log=comm_log) for axis in _axes(layout, rank)
        }
        if links is None:
            links = layout.pp > 1 and dist.is_initialized() and dist.get_backend() != "gloo"
        pp_links = _build_links(layout, rank, timeout) if links else {}
        return ParallelState(layout, rank, pp_links=pp_links, comm_log=comm_log, **axes)

    @staticmethod
    def plan(layout: Layout, rank: int) -> ParallelState:
        """The same axes without process groups, for arithmetic: a collective over one of them raises."""
        return ParallelState(layout, rank, **{axis.name: axis for axis in _axes(layout, rank)})  # type: ignore[arg-type]

    def axis(self, name: str) -> Axis:
        if name not in AXES:
            raise ValueError(f"unknown axis {name!r}; there are {', '.join(AXES)}")
        axis: Axis = getattr(self, name)
        return axis


def _axes(layout: Layout, rank: int) -> list[Axis]:
    """Without process groups."""
    members = {name: layout.group_of(name, rank) for name in AXES}
    return [Axis(name, ranks.index(rank), len(ranks), ranks) for name, ranks in members.items()]


def _make_groups(layout: Layout, make_group: GroupMaker) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Every rank makes every group, because creating one is a collective of the whole world. dp and dp_cp are often the
    same ranks: one communicator serves both."""
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for name in AXES:
        for ranks in layout.groups(name):
            if len(ranks) > 1 and ranks not in made:
                made[ranks] = make_group(name, ranks)
    return made


def _build_links(layout: Layout, rank: int, timeout: timedelta | None) -> dict[LinkEnd, Axis]:
    """Makes the groups of all pipelines on every rank, as torch requires; the keys are in the order of their making."""
    links: dict[LinkEnd, Axis] = {}
    for what, sender, receiver in layout.pipeline_links():
        group = dist.new_group([sender, receiver], timeout=timeout, group_desc=f"pp {what}")
        if rank in (sender, receiver):
            ends = tuple(sorted((sender, receiver)))
            links[what, rank == sender] = Axis(f"pp {what}", ends.index(rank), 2, ends, group)
    return links


def _new_group(name: str, ranks: tuple[int, ...], timeout: timedelta | None) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise RuntimeError(f"the {name} axis has {len(ranks)} ranks, but no process group was initialised")
    if len(ranks) == dist.get_world_size() and dist.group.WORLD is not None:
        return dist.group.WORLD
    # Ranks outside the group get a placeholder.
    return dist.new_group(list(ranks), timeout=timeout, group_desc=name)
