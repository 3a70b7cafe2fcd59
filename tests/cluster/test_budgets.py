"""Cost per rank of starting N ranks, as functions of N; docs/scale.md states the same formulas."""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megatron.distributed.identity import Identity
from megatron.distributed.launch import LaunchInfo
from megatron.distributed.limits import OWN_FILES, allow_open_files, gloo_sockets
from megatron.distributed.meeting import Patience, wait_for_all
from megatron.distributed.parallel_state import ParallelState
from megatron.errors import ConfigError
from megatron.layout import Layout
from megatron.prove.order.recorder import recorded
from tests.helpers.distributed import run_ranks

# (layout, groups that a rank makes below the world, how many of them are links between stages)
COUNTS = {
    8: (Layout(8, tp=2, pp=2), 8, 4),
    64: (Layout(64, tp=4, pp=4, cp=2, ep=4), 12, 4),
    1024: (Layout(1024, tp=8, pp=8), 9, 4),
    8192: (Layout(8192, tp=8, pp=16, cp=2, ep=8), 13, 4),
    2048: (Layout(2048, tp=8, pp=8, instances=4), 11, 4),
    4096: (Layout(4096, tp=8, pp=8, cp=2, ep=4, instances=4), 16, 4),
}


def groups_made(layout: Layout, rank: int) -> list[tuple[str, int]]:
    """(axis, members) of each group that the rank asks torch for."""
    made: list[tuple[str, int]] = []
    new_group = dist.new_group

    def count(ranks: Sequence[int], **options: Any) -> Any:
        made.append((options["group_desc"], len(ranks)))
        return new_group(ranks, **options)

    with recorded(rank, layout.world_size), patch.object(dist, "new_group", count):
        ParallelState.build(layout, rank, links=layout.pp > 1)
    return made


@pytest.mark.parametrize("world_size", COUNTS)
def test_groups_of_a_rank_do_not_grow_with_the_ranks(world_size: int) -> None:
    layout, groups, links = COUNTS[world_size]
    for rank in (0, world_size // 2 + 1, world_size - 1):
        made = groups_made(layout, rank)
        assert len(made) == groups and sum(name.startswith("pp ") for name, _ in made) == links


@pytest.mark.parametrize("world_size", COUNTS)
def test_nccl_makes_all_groups_of_an_axis_in_one_split(world_size: int) -> None:
    """One split of the world makes all groups of an axis. torch derives a group's colour from its ranks, so the colours
    of an axis must differ."""
    layout, _, _ = COUNTS[world_size]
    for name in (
        "tp",
        "cp",
        "ep",
        "dp",
        "pp",
        "dp_cp",
        "expert_dp",
        "shard",
        "expert_shard",
        "replicate",
        "embedding",
        "model",
    ):
        groups = layout.groups(name)
        assert len({abs(hash(ranks)) % 2**31 for ranks in groups}) == len(groups)


@pytest.mark.parametrize("world_size", COUNTS)
def test_sockets_with_an_accelerator_are_those_of_one_mesh(world_size: int) -> None:
    layout, _, _ = COUNTS[world_size]
    assert gloo_sockets(layout, "nccl") == world_size


def open_sockets() -> int:
    def is_socket(number: str) -> bool:
        try:
            return str(Path("/proc/self/fd", number).readlink()).startswith("socket")
        except FileNotFoundError:  # that of the listing itself
            return False

    return sum(map(is_socket, os.listdir("/proc/self/fd")))


class CountingStore(dist.Store):
    """Counts the operations that gloo asks for."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self.inner, self.asked = inner, Counter[str]()

    def set(self, key: str, value: Any) -> None:
        self.asked["set"] += 1
        self.inner.set(key, value)

    def get(self, key: str) -> Any:
        self.asked["get"] += 1
        return self.inner.get(key)

    def wait(self, keys: Any, *timeout: Any) -> None:
        self.asked["wait"] += 1
        self.inner.wait(keys, *timeout)

    def add(self, key: str, amount: int) -> int:
        self.asked["add"] += 1
        return int(self.inner.add(key, amount))

    def append(self, key: str, value: str) -> None:
        self.asked["append"] += 1
        self.inner.append(key, value)  # type: ignore[attr-defined]  # torch's stubs lack it

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self.asked["compare_set"] += 1
        return bytes(self.inner.compare_set(key, expected, value))

    def check(self, keys: list[str]) -> bool:
        self.asked["check"] += 1
        return bool(self.inner.check(keys))


def costs(rank: int, size: int, path: Path) -> list[tuple[int, dict[str, int]]]:
    """(sockets, store operations) of the world, and of the state of a layout."""
    dist.barrier()  # a rank that leaves while another still connects closes its connection
    dist.destroy_process_group()
    without = open_sockets()
    store = CountingStore(dist.FileStore(str(path), size))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    of_world = open_sockets() - without, dict(store.asked)
    store.asked.clear()
    ParallelState.build(Layout(size, tp=2, pp=2), rank, links=False)
    of_state = open_sockets() - without - of_world[0], dict(store.asked)
    dist.barrier()
    return [of_world, of_state]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts the sockets in /proc")
def test_costs_of_gloo_groups(tmp_path: Path) -> None:
    """A group of n costs each rank n sockets (one to each other member, one listener) and 2n + 1 store operations."""
    size = 8
    for of_world, of_state in run_ranks(size, costs, size, tmp_path / "store"):
        assert of_world == (size, {"set": 1, "get": size, "wait": size})
        members = [2, 2, 2, 4]  # tp; dp, which dp_cp and expert_dp share; pp, which embedding shares; model
        groups = len(members)
        assert of_state[1] == {"set": groups, "get": sum(members), "wait": sum(members)}
        assert of_state[0] == sum(members)


@pytest.mark.parametrize("size", [8, 64])
def test_meeting_takes_as_many_store_operations_of_a_rank_whatever_their_number(size: int) -> None:
    """Ranks are threads of this process. The first to arrive publishes its settings; the last notifies the others."""
    shared = dist.HashStore()
    stores = [CountingStore(shared) for _ in range(size)]

    def meet(rank: int) -> None:
        info = LaunchInfo(rank=rank, world_size=size, agent_store=True)
        wait_for_all(stores[rank], Identity(rank, {"--lr": "0.1"}), info, Patience(timedelta(seconds=60)))

    threads = [Thread(target=meet, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    usual = {"add": 2, "append": 1, "compare_set": 1, "wait": 1, "check": 1, "get": 1}
    extra = [dict(store.asked - Counter(usual)) for store in stores]
    assert [store.asked & Counter(usual) for store in stores] == [Counter(usual)] * size
    assert sum(usual.values()) == 7 and sum(sum(more.values()) for more in extra) == 2, "the first sets, and the last"


class TestOpenFiles:
    def limits(self, monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> list[tuple[int, int]]:
        given: list[tuple[int, int]] = []
        monkeypatch.setattr(resource, "getrlimit", lambda what: (soft, hard))
        monkeypatch.setattr(resource, "setrlimit", lambda what, limits: given.append(limits))
        return given

    def test_few_ranks_need_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for soft in (4096, resource.RLIM_INFINITY):
            given = self.limits(monkeypatch, soft, resource.RLIM_INFINITY)
            assert allow_open_files(Layout(8, tp=2), "gloo") is None and not given

    def test_many_raise_it_and_say_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        given = self.limits(monkeypatch, 1024, 1048576)
        said = allow_open_files(Layout(1024, tp=8, pp=8), "nccl")
        assert given == [(1024 + OWN_FILES, 1048576)] and said is not None and "2048" in said and "1024" in said

    def test_a_system_that_does_not_allow_it_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        given = self.limits(monkeypatch, 1024, 4096)
        with pytest.raises(ConfigError, match=r"ulimit -n 4096: a rank of 8192 may open 9216 .*nofile"):
            allow_open_files(Layout(8192, tp=8), "nccl")
        assert not given
