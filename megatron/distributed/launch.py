"""Detects how this process was launched, and leaves its process group.

No other module reads the environment, in which torchrun, `python -m torch.distributed.launch` and Slurm pass a process
its rank. Users need not export anything.
"""

import gc
import importlib
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from operator import attrgetter

import torch.distributed as dist

# Functions of `torch.distributed.nn.functional` take the world group that exists at the import as default argument, and
# so keep it alive (see `shutdown`). Otherwise torch would import it later, with an optimizer or `fully_shard`.
import torch.distributed.nn.functional  # noqa: F401

from megatron.errors import ConfigError, PeerLostError
from megatron.utils.numerals import whole_number
from megatron.utils.process import signal_at_parent_death

_WITHOUT_THREADS = ("fake", "recorded")
"""Backends without threads: they communicate nothing. One is torch's, the other from `megatron.prove.order`."""


@dataclass(frozen=True, kw_only=True)
class LaunchInfo:
    """Facts that the launcher passes to this process. The default is a single process started by plain `python`."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    run_id: str = "none"
    attempt: int = 0
    """Number of restarts of the job by the launcher."""
    launcher: str = "python"
    """"torchrun" (also torch.distributed.launch), "slurm", "environment" (RANK and friends set by hand) or "python"."""
    agent_store: bool = False
    """True if the launcher's agent serves the rendezvous store; else rank 0 does."""
    parent: int = 0
    """Process that started this one."""

    blocking_launches: bool = False
    """True under CUDA_LAUNCH_BLOCKING: the host waits for each operation that it launches."""

    allocator: str = ""
    """User's setting of torch's allocator: PYTORCH_ALLOC_CONF, or its older name."""

    local_is_said: bool = True
    """True if the launcher reports the number of ranks on this machine; else `local_world_size` is the world size."""

    listed_here: tuple[int, ...] = ()
    """Ranks of this machine, if the launcher lists them."""

    @property
    def ranks_here(self) -> Sequence[int]:
        """Ranks of this machine; consecutive numbers, unless the launcher lists them."""
        first = self.rank - self.local_rank
        return self.listed_here or range(max(0, first), min(first + self.local_world_size, self.world_size))

    @property
    def single_node(self) -> bool:
        """True if all ranks are certainly on this machine: the launcher reports it, or they meet on loopback."""
        on_loopback = self.master_addr == "localhost" or self.master_addr.startswith(("127.", "::1"))
        return self.local_world_size == self.world_size and (self.local_is_said or on_loopback)

    @property
    def keeps_store(self) -> bool:
        """True if the ranks' store is in this process, and ends with it."""
        return self.rank == 0 and not self.agent_store

    @property
    def store_host(self) -> str:
        """Host of the ranks' store. A store that rank 0 opens for a single machine listens on loopback only."""
        return "127.0.0.1" if self.single_node and not self.agent_store else self.master_addr

    @staticmethod
    def detect(local_rank: int | None = None, env: Mapping[str, str] | None = None) -> "LaunchInfo":
        """Reads the environment; `local_rank` is the value of --local-rank if the launcher passed one."""
        env = os.environ if env is None else env
        if env.get("RANK") or env.get("WORLD_SIZE"):
            info = _from_torch(env, local_rank)
        elif _number(env, "SLURM_STEP_NUM_TASKS", 1) > 1:  # set by srun, not in the batch script
            info = _from_slurm(env, local_rank)
        else:
            info = LaunchInfo(local_rank=local_rank or 0, parent=os.getppid())
        _check(info)
        allocator = env.get("PYTORCH_CUDA_ALLOC_CONF") or env.get("PYTORCH_ALLOC_CONF") or ""
        blocks = env.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")
        return replace(info, blocking_launches=blocks, allocator=allocator)


def _from_torch(env: Mapping[str, str], local_rank: int | None) -> LaunchInfo:
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    world_size = _number(env, "WORLD_SIZE", 1)
    if missing and not (world_size == 1 and env.get("RANK")):
        raise ConfigError(
            f"the environment has RANK or WORLD_SIZE but not {' and '.join(missing)}: start with torchrun, "
            "or unset RANK and WORLD_SIZE to run one process"
        )
    rank = _number(env, "RANK", 0)
    elastic = "TORCHELASTIC_RUN_ID" in env
    return LaunchInfo(
        rank=rank,
        world_size=world_size,
        local_rank=_local_rank(env, "LOCAL_RANK", local_rank, rank),
        local_world_size=_number(env, "LOCAL_WORLD_SIZE", world_size),
        local_is_said="LOCAL_WORLD_SIZE" in env,
        master_addr=env.get("MASTER_ADDR") or "127.0.0.1",
        master_port=_number(env, "MASTER_PORT", 0),
        run_id=env.get("TORCHELASTIC_RUN_ID", "none"),
        attempt=_number(env, "TORCHELASTIC_RESTART_COUNT", 0),
        launcher="torchrun" if elastic else "environment",
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        parent=os.getppid(),
    )


def _local_rank(env: Mapping[str, str], name: str, flag: int | None, default: int) -> int:
    said = _number(env, name, default if flag is None else flag)
    if flag not in (None, said):
        raise ConfigError(f"--local-rank {flag} contradicts {name}={said} of the launcher; remove --local-rank")
    return said


def _from_slurm(env: Mapping[str, str], local_rank: int | None) -> LaunchInfo:
    job, here = _number(env, "SLURM_JOB_ID", 0), _listed_tasks(env)
    return LaunchInfo(
        rank=_number(env, "SLURM_PROCID", 0),
        world_size=_number(env, "SLURM_STEP_NUM_TASKS", 1),
        local_rank=_local_rank(env, "SLURM_LOCALID", local_rank, 0),
        local_world_size=len(here) or _tasks_of_node(env),
        listed_here=here,
        master_addr=env.get("MASTER_ADDR") or first_host(env.get("SLURM_STEP_NODELIST", "127.0.0.1")),
        # The port follows from the job and step numbers, so that two jobs on one machine use different ones.
        master_port=_number(env, "MASTER_PORT", 20000 + (job * 7 + _number(env, "SLURM_STEP_ID", 0)) % 20000),
        run_id=f"slurm-{job}",
        attempt=_number(env, "SLURM_RESTART_COUNT", 0),
        launcher="slurm",
        parent=os.getppid(),
    )


def _listed_tasks(env: Mapping[str, str]) -> tuple[int, ...]:
    """Tasks of this node, if Slurm lists them: with `srun --distribution=cyclic` they are not consecutive."""
    text = env.get("SLURM_GTIDS", "")
    try:
        tasks = tuple(map(whole_number, text.split(","))) if text else ()
    except ValueError:
        raise ConfigError(f"SLURM_GTIDS={text!r} in the environment: not a list of tasks; start with srun") from None
    size = _number(env, "SLURM_STEP_NUM_TASKS", 1)
    if tasks and (_number(env, "SLURM_PROCID", 0) not in tasks or not all(0 <= task < size for task in tasks)):
        raise ConfigError(
            f"SLURM_GTIDS={text!r} in the environment: must contain SLURM_PROCID="
            f"{env.get('SLURM_PROCID', 0)} and only tasks from 0 to {size - 1}; start with srun"
        )
    return tasks


def _tasks_of_node(env: Mapping[str, str]) -> int:
    """Number of tasks of this node, from a list of all nodes such as "2(x3),1"."""
    name, node = "SLURM_STEP_TASKS_PER_NODE", _number(env, "SLURM_NODEID", 0)
    text, left = env.get(name, "1"), node
    try:
        for entry in text.split(","):
            tasks, _, times = entry.removesuffix(")").partition("(x")
            nodes = whole_number(times or "1")
            if left < nodes:
                return whole_number(tasks)
            left -= nodes
    except ValueError:
        raise ConfigError(f"{name}={text!r} in the environment: cannot be read; start with srun") from None
    raise ConfigError(f"SLURM_NODEID={node} is outside {name}={text}; start with srun")


def first_host(nodelist: str) -> str:
    """First machine of a Slurm list such as "login1,gpu[003-007,012]-ib"."""
    head = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,]*))?", nodelist)
    if head is None:
        raise ConfigError(f"SLURM_STEP_NODELIST {nodelist!r}: cannot be read; set MASTER_ADDR to the first machine")
    return "".join(part or "" for part in head.groups())


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    try:
        return whole_number(text) if text else default
    except ValueError:
        raise ConfigError(
            f"{name}={text!r} in the environment: must be a whole number of 64 bits; start with torchrun"
        ) from None


_SAID_BY_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SAID_BY_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")


def _check(info: LaunchInfo) -> None:
    rank, size, local_rank, local_size = _SAID_BY_SLURM if info.launcher == "slurm" else _SAID_BY_TORCH
    start = "start with srun" if info.launcher == "slurm" else "start with torchrun"
    if not 0 <= info.rank < info.world_size:
        raise ConfigError(f"{rank}={info.rank} is outside {size}={info.world_size}; {start}")
    if not 1 <= info.local_world_size <= info.world_size:
        raise ConfigError(
            f"{local_size}={info.local_world_size} is not from 1 to {size}={info.world_size}, the number of ranks; "
            f"{start}"
        )
    if not 0 <= info.local_rank < info.local_world_size:
        own = f"--local-rank {info.local_rank}" if info.launcher == "python" else f"{local_rank}={info.local_rank}"
        last = info.local_world_size - 1
        raise ConfigError(f"{own}: local ranks are 0 to {last} where {local_size}={last + 1}; remove it, or {start}")
    if info.local_rank > info.rank:
        raise ConfigError(f"{local_rank}={info.local_rank} is above {rank}={info.rank}; {start}")
    if info.world_size > 1 and not 0 < info.master_port < 2**16:
        raise ConfigError(
            f"MASTER_PORT={info.master_port}: not a port; give 1 to 65535, as torchrun --master-port does"
        )


def keep_products_repeatable() -> None:
    """Fixes the size of cuBLAS's workspace, which makes its summation order deterministic. cuBLAS reads it from the
    environment at its first product, and torch's deterministic mode rejects products without it."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def shutdown(*, barrier: bool = True, timeout: timedelta = timedelta(minutes=10)) -> None:
    """Leaves the process group. Otherwise a finished job may end in SIGABRT and count as failed: if a group's thread
    frees a tensor while Python exits, Python stops the thread, and C++ then aborts.

    The ranks wait for each other up to `timeout`, because one may still be uploading logs. After an error on this rank
    pass `barrier=False`, because the others will not reach the barrier.
    """
    if not dist.is_initialized():
        return
    began = time.monotonic()
    try:
        if barrier:
            work = dist.barrier(async_op=True)
            if work is not None:
                work.wait(timeout)
    except RuntimeError as error:
        raise PeerLostError(
            f"rank {dist.get_rank()} waited {time.monotonic() - began:.0f} s for the others to finish: "
            f"{str(error).splitlines()[0]}; read the logs of the other ranks"
        ) from error
    finally:
        has_threads = dist.get_backend() not in _WITHOUT_THREADS
        dist.destroy_process_group()
        _forget_sharded_models(in_cycles=has_threads)


_CACHES_OF_SHARDINGS = (
    ("debug", "_clear_sharding_prop_cache"),
    ("_redistribute", "clear_redistribute_planner_cache"),
    ("_redistribute", "_gen_transform_infos.cache_clear"),
    ("_collective_utils", "MeshTopoInfo.build_from_mesh.cache_clear"),
)


def _forget_sharded_models(in_cycles: bool) -> None:
    """Frees the process groups that models under `fully_shard` keep alive, in reference cycles and in torch's caches of
    DTensor shardings and redistributions."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    for module, clear in _CACHES_OF_SHARDINGS:
        with suppress(ImportError, AttributeError):  # private to torch: other versions may lack it
            attrgetter(clear)(importlib.import_module(f"torch.distributed.tensor.{module}"))()
    if in_cycles:
        gc.unfreeze()  # objects frozen by `megatron.utils.loading`
        gc.collect()


def die_with_parent(info: LaunchInfo) -> bool:
    """Requests SIGTERM from the kernel when the launcher dies, so that no orphaned rank keeps writing checkpoints.
    Returns True if that worked. Only torchrun's ranks request it, because torchrun supervises them: a process started
    from a shell must outlive the shell.
    """
    if info.launcher != "torchrun" or not signal_at_parent_death(signal.SIGTERM):
        return False
    if not parent_alive(info):  # it died before the prctl
        os.kill(os.getpid(), signal.SIGTERM)
    return True


def parent_alive(info: LaunchInfo) -> bool:
    """True if the parent process still runs (an orphan gets another parent)."""
    return info.parent in (0, os.getppid())
