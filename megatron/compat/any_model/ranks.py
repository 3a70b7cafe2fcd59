"""Placement of this process among the ranks: in the user's own process group, in the launcher's, or alone."""

import atexit
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.distributed.device import accelerator_type, activate, resolve_backend, resolve_device
from megatron.distributed.launch import LaunchInfo, shutdown
from megatron.distributed.parallel_state import ParallelState
from megatron.distributed.rendezvous import init_process_group, open_group_of_one
from megatron.errors import ConfigError, PeerLostError
from megatron.layout import Layout

TIMEOUT = timedelta(minutes=10)
_LAST_WAIT = timedelta(seconds=10)
"""Timeout of the barrier at the end of a program."""


@dataclass(frozen=True)
class RankPlacement:
    parallel: ParallelState
    local_rank: int
    device: torch.device


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta = TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Opens the process group of the launcher's ranks, or of this process alone, unless one is open. The launcher sets
    the address at which ranks meet."""
    del auto_mpi_discovery, distributed_port, verbose, dist_init_required, config
    if dist.is_initialized():
        return
    launch = LaunchInfo.detect()
    if init_method is not None or rank not in (-1, launch.rank) or world_size not in (-1, launch.world_size):
        raise ConfigError(
            "init_distributed(): the launcher sets init_method, rank and world_size; remove them and start the program "
            "with torchrun, or call torch.distributed.init_process_group() yourself before"
        )
    device = resolve_device("auto", launch.local_rank)
    backend = resolve_backend(dist_backend, device, "init_distributed(): dist_backend")
    if launch.world_size == 1:
        open_group_of_one(device)
    else:
        init_process_group(launch, backend, timeout, device)
    atexit.register(shutdown_at_exit)


def find_place(model: nn.Module) -> RankPlacement:
    """Finds this rank's place. If no process group is open, opens the launcher's group until the process ends."""
    if dist.is_initialized():
        rank, size, local_rank = dist.get_rank(), dist.get_world_size(), _own_local_rank()
        device = _device_of(model, local_rank, dist.get_backend_config())
        activate(device)
    else:
        launch = LaunchInfo.detect()
        rank, size, local_rank = launch.rank, launch.world_size, launch.local_rank
        device = _device_of(model, local_rank)
        init_process_group(launch, resolve_backend(None, device), TIMEOUT, device)
        atexit.register(shutdown_at_exit)  # also a group of one, which ZeRO's stage 3 opens
    return RankPlacement(ParallelState.build(Layout(size), rank), local_rank, device)


def shutdown_at_exit() -> None:
    """Shuts down at the end of the program, after a barrier. Without it, a process can abort: gloo's threads may still
    hold tensors of the last collective when the interpreter ends. A rank that ends with an error skips the barrier,
    because the others are not at their end."""
    with suppress(PeerLostError):
        shutdown(barrier=not hasattr(sys, "last_value"), timeout=_LAST_WAIT)


def _own_local_rank() -> int:
    """Returns the local rank in a group that the user opened: the launcher's, else rank modulo devices."""
    with suppress(ConfigError):
        launch = LaunchInfo.detect()
        if launch.world_size == dist.get_world_size():
            return launch.local_rank
    accelerator = accelerator_type()
    return dist.get_rank() if accelerator is None else dist.get_rank() % torch.accelerator.device_count()


def _device_of(model: nn.Module, local_rank: int, backends: str = "") -> torch.device:
    """Returns the model's device if it is not the CPU, else this rank's accelerator. A user's group with only gloo
    selects the CPU."""
    devices = {tensor.device for tensor in [*model.parameters(), *model.buffers()]}
    if len(devices) > 1:
        raise ConfigError(
            f"model: its tensors are on {', '.join(sorted(map(str, devices)))}; put the whole model on one device, "
            "or keep it on the CPU, from where the engine moves it"
        )
    own = devices.pop() if devices else torch.device("cpu")
    if own.type != "cpu":
        return own
    backend_of = dict(part.split(":") for part in backends.split(",") if part)
    served = not backends or backend_of.get(accelerator_type() or "cpu", "gloo") != "gloo"
    return resolve_device("auto" if served else "cpu", local_rank)
