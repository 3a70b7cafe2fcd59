"""Values that a process reads from its launcher's environment, without a launcher."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch

from megatron.distributed import device as device_module
from megatron.distributed import launch
from megatron.distributed.device import group_backend, resolve_backend, resolve_device
from megatron.distributed.launch import LaunchInfo, first_host
from megatron.distributed.rendezvous import init_process_group
from megatron.errors import ConfigError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
ALONE = {"RANK": "0", "WORLD_SIZE": "1"}
SLURM = {
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
}


def test_plain_python_is_one_process() -> None:
    info = LaunchInfo.detect(env={"PATH": "/bin"})
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (0, 1, 0, 1)
    assert info.launcher == "python" and info.parent == os.getppid() and info.single_node


def test_torchrun() -> None:
    info = LaunchInfo.detect(env=TORCHRUN)
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (5, 8, 1, 4)
    assert (info.master_addr, info.master_port, info.run_id, info.attempt) == ("node0", 29500, "job", 2)
    assert info.launcher == "torchrun" and info.agent_store and not info.single_node


@pytest.mark.parametrize("flag", [None, 1])
def test_the_launch_module_passes_the_local_rank_twice(flag: int | None) -> None:
    assert LaunchInfo.detect(flag, TORCHRUN).local_rank == 1


def test_the_local_rank_flag_alone() -> None:
    env = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    info = LaunchInfo.detect(1, env)
    assert (info.local_rank, info.local_world_size, info.launcher) == (1, 4, "environment")
    assert LaunchInfo.detect(None, env).local_rank == 3


def test_slurm_step() -> None:
    info = LaunchInfo.detect(env=SLURM)
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (9, 16, 1, 8)
    assert (info.master_addr, info.launcher, info.run_id) == ("gpu003", "slurm", "slurm-1234")
    assert 20000 <= info.master_port < 40000


UNEVEN = {**SLURM, "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}


@pytest.mark.parametrize(
    ("rank", "local", "node", "here"), [(0, 0, 0, [0, 1]), (1, 1, 0, [0, 1]), (3, 1, 1, [2, 3]), (4, 0, 2, [4])]
)
def test_slurm_with_uneven_nodes(rank: int, local: int, node: int, here: list[int]) -> None:
    place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node)}
    info = LaunchInfo.detect(env={**UNEVEN, **place})
    assert info.local_world_size == len(here) and list(info.ranks_here) == here


def test_slurm_with_tasks_dealt_to_nodes_in_turn() -> None:
    """Uses `srun --distribution=cyclic`."""
    place = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_GTIDS": "0,3"}
    info = LaunchInfo.detect(env={**UNEVEN, **place})
    assert info.local_world_size == 2 and list(info.ranks_here) == [0, 3]


def test_the_ranks_of_a_machine() -> None:
    assert list(LaunchInfo().ranks_here) == [0]
    assert list(LaunchInfo.detect(env=TORCHRUN).ranks_here) == [4, 5, 6, 7]
    last = {**TORCHRUN, "RANK": "6", "WORLD_SIZE": "7", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    assert list(LaunchInfo.detect(env=last).ranks_here) == [6]


def test_a_slurm_allocation_without_srun_is_one_process() -> None:
    assert LaunchInfo.detect(env={"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}).world_size == 1


def test_torchrun_inside_slurm_is_torchrun() -> None:
    assert LaunchInfo.detect(env={**SLURM, **TORCHRUN}).launcher == "torchrun"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[003-007,012]", "gpu003"), ("a,b", "a"), ("login1,gpu[1-2]", "login1"), ("n[7]-ib", "n7-ib"), ("h1", "h1")],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("env", "local_rank", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, None, ["MASTER_ADDR and MASTER_PORT", "torchrun"]),
        ({"WORLD_SIZE": "2"}, None, ["RANK", "torchrun"]),
        ({**TORCHRUN, "RANK": ""}, None, ["RANK", "torchrun"]),
        ({**TORCHRUN, "MASTER_ADDR": ""}, None, ["MASTER_ADDR", "torchrun"]),
        ({**TORCHRUN, "RANK": "8"}, None, ["RANK=8", "WORLD_SIZE=8"]),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, None, ["LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4"]),
        ({**TORCHRUN, "RANK": "x"}, None, ["RANK='x'", "whole number"]),
        (TORCHRUN, 0, ["--local-rank 0", "LOCAL_RANK=1"]),
        ({"SLURM_STEP_NUM_TASKS": "many"}, None, ["SLURM_STEP_NUM_TASKS='many'"]),
        ({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "1"}, None, ["LOCAL_RANK=1 is above RANK=0", "torchrun"]),
        ({**SLURM, "SLURM_STEP_NODELIST": "["}, None, ["SLURM_STEP_NODELIST", "MASTER_ADDR"]),
        ({}, 5, ["--local-rank 5", "0 to 0"]),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "99999"}, None, ["LOCAL_RANK=99999", "0 to 0"]),
        ({**ALONE, "LOCAL_WORLD_SIZE": "5", "LOCAL_RANK": "4"}, None, ["LOCAL_WORLD_SIZE=5", "WORLD_SIZE=1"]),
        ({**TORCHRUN, "LOCAL_RANK": "-1"}, None, ["LOCAL_RANK=-1"]),
        (SLURM, 0, ["--local-rank 0", "SLURM_LOCALID=1"]),
        ({**TORCHRUN, "MASTER_PORT": "99999999"}, None, ["MASTER_PORT=99999999", "65535"]),
        ({**TORCHRUN, "MASTER_PORT": "-5"}, None, ["MASTER_PORT=-5", "65535"]),
        ({**TORCHRUN, "MASTER_PORT": "0"}, None, ["MASTER_PORT=0", "65535"]),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "9" * 5000}, None, ["SLURM_STEP_TASKS_PER_NODE", "srun"]),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8(x1)", "SLURM_NODEID": "1"}, None, ["SLURM_NODEID=1", "8(x1)"]),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8(y2)"}, None, ["SLURM_STEP_TASKS_PER_NODE", "8(y2)"]),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "٣"}, None, ["SLURM_STEP_TASKS_PER_NODE"]),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1"}, None, ["SLURM_LOCALID=1", "0 to 0"]),
        ({**SLURM, "SLURM_GTIDS": "8,x"}, None, ["SLURM_GTIDS", "8,x"]),
        ({**SLURM, "SLURM_GTIDS": "8,11"}, None, ["SLURM_GTIDS", "SLURM_PROCID=9"]),
    ],
)
def test_refusals(env: dict[str, str], local_rank: int | None, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        LaunchInfo.detect(local_rank, env)
    assert all(word in str(error.value) for word in words), error.value


def test_the_parent_guard_is_for_supervised_ranks_only() -> None:
    assert launch.die_with_parent(LaunchInfo(launcher="python")) is False
    assert launch.parent_alive(LaunchInfo(parent=os.getppid()))
    assert not launch.parent_alive(LaunchInfo(parent=2**22 + 1))


def test_one_process_has_no_group() -> None:
    init_process_group(LaunchInfo(), "gloo", timedelta(seconds=1))
    assert not torch.distributed.is_initialized()
    launch.shutdown()


def test_the_accelerator_becomes_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    for name in ("cpu", "cuda:3"):
        init_process_group(LaunchInfo(), "gloo", timedelta(seconds=1), torch.device(name))
    assert chosen == [3]


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str | None, count: int = 2) -> None:
    monkeypatch.setattr(device_module, "accelerator_type", lambda: kind)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


def test_device_without_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None)
    assert resolve_device("auto") == resolve_device("cpu", 3) == torch.device("cpu")
    for setting, word in (("cuda", "not available"), ("cuda:0", "no accelerator"), ("gpu", "not a device")):
        with pytest.raises(ConfigError, match=word):
            resolve_device(setting)


def test_device_with_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "cuda")
    assert resolve_device("auto", 1) == torch.device("cuda", 1)
    assert resolve_device("cuda", 1) == torch.device("cuda", 1)
    assert resolve_device("cuda:0", 1) == torch.device("cuda", 0)
    assert resolve_device("cpu", 1) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"local rank 2 .* at most 2 processes"):
        resolve_device("auto", 2)
    with pytest.raises(ConfigError, match="--device npu"):
        resolve_device("npu")


@pytest.mark.parametrize(
    ("setting", "device", "backend"),
    [(None, "cpu", "gloo"), ("gloo", "cpu", "gloo"), ("gloo", "cuda", "gloo")],
)
def test_backend(setting: str | None, device: str, backend: str) -> None:
    assert resolve_backend(setting, torch.device(device)) == backend


def test_backend_follows_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: True)
    assert resolve_backend(None, torch.device("cuda", 0)) == "nccl"
    assert group_backend("nccl", torch.device("cuda", 0)) == "cpu:gloo,cuda:nccl"
    assert group_backend("gloo", torch.device("cpu")) == "gloo"


@pytest.mark.parametrize(
    ("setting", "device", "available", "words"),
    [
        ("nccl", "cpu", True, ["--distributed-backend nccl", "gloo"]),
        ("mpi", "cuda", True, ["--distributed-backend mpi", "nccl or gloo"]),
        ("nccl", "cuda", False, ["--distributed-backend nccl", "built without", "gloo"]),
    ],
)
def test_backend_refusals(
    monkeypatch: pytest.MonkeyPatch, setting: str, device: str, available: bool, words: list[Any]
) -> None:
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: available)
    with pytest.raises(ConfigError) as error:
        resolve_backend(setting, torch.device(device))
    assert all(word in str(error.value) for word in words), error.value


def test_ranks_of_a_launcher_that_does_not_count_them_may_be_on_several_machines() -> None:
    by_hand = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node-1", "MASTER_PORT": "29500"}
    info = LaunchInfo.detect(env=by_hand)
    assert not info.single_node and info.store_host == "node-1"
    for here in ("localhost", "127.0.0.1"):
        assert LaunchInfo.detect(env={**by_hand, "MASTER_ADDR": here}).single_node
    assert LaunchInfo.detect(env={**by_hand, "LOCAL_WORLD_SIZE": "2"}).store_host == "127.0.0.1"


def test_only_a_store_of_ours_on_one_machine_is_found_on_loopback() -> None:
    ours = LaunchInfo(world_size=2, local_world_size=2, master_addr="node-1")
    assert ours.store_host == "127.0.0.1"
    assert replace(ours, agent_store=True).store_host == "node-1"
    assert replace(ours, world_size=4).store_host == "node-1"
